"""``--data-balance`` and ``--order-microbatches`` for any host: microbatches change places, never their samples.

flags        the two switches
weights      the work of a microbatch, by the sizes of its tensors
exchange     whole microbatches given to other replicas by one all-to-all
stepping     the schedule's iterator, with the microbatches of a step in another order
request      the checked flags, and what is refused before anything is built
apply        this process's order, set up
entry        both, for ``runtime.megatron.features``
"""
