"""Search configurations of a traced model by its traces and the knowledge base. Plain data, no torch.

``candidates``  all combinations of the searched dimensions: legal, or counted by broken rule
``pricing``     times of traced blocks: operators, collectives, the CPU's overhead
``links``       latency and bandwidth per collective and tier, from samples
``host``        host time per call, fitted to a few whole blocks
``steps``       step time outside the blocks, fitted to a few whole steps
``placements``  the best placement of a configuration; ``placement_bounds``: lower bounds of it
``search``      best first by a proved bound, exact where it matters
"""
