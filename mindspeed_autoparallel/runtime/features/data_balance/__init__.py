"""``--data-balance`` and ``--order-microbatches`` for any host: microbatches change places, never their samples.

flags        the two switches
weights      the work of a microbatch, by the sizes of its tensors
stepping     the microbatches of a step, exchanged between replicas and handed to the schedule in another order
entry        the checked flags, set up in this process
"""
