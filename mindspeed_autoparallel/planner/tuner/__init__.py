"""Search configurations of a traced model by its traces and the knowledge base. Plain data, no torch.

``candidates``  every combination of the searched dimensions, legal or with the reason why not
``pricing``     times of traced blocks: operators, collectives, the CPU's overhead
``links``       latency and bandwidth per collective and tier, from samples
``host``        what a call costs beside its kernel, from a few whole blocks
``steps``       what a step costs beside its blocks, from a few whole steps
``placements``  the best placement of a configuration; ``placement_bounds``: what it needs at least
``search``      best first by a proved bound, exact where it matters
"""
