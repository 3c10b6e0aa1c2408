"""From traces of the user's own model and the knowledge base to the fastest configurations: plain data, no torch.

``pricing``         times for traced blocks: operators, collectives, the host
``links``           latency and bandwidth per collective and tier, from samples
``host``            what a call costs beside its kernel, from a few whole blocks
``steps``           what a step costs beside its blocks, from a few whole steps
``candidates``      every combination of the searched dimensions, legal or with the reason why not
``search``          best first by a proved bound, exact where it matters
``argv``            a configuration as Megatron's own flags
``result``          the JSON, the table and the page
"""
