"""Search of configurations of a traced model, priced by its traces and the knowledge base. Plain data, no torch.

candidates    all combinations of the searched dimensions: legal, or counted by broken rule
pricing       times of traced blocks: operators, collectives, host overhead
links         latency and bandwidth per collective and tier, from samples
host          host time per call, fitted to a few whole blocks
corrections   ratios of measured to predicted block times
stages        step time outside the blocks, and costs of pipeline stages, fitted to whole steps and short pipelines
modelled      switches without effect in a CPU trace
balanced      splits of layers of several kinds
placements    the best placement of a configuration; ``placement_bounds``: lower bounds of it
search        best-first search; ``ranking``: measured and modelled configurations in one list
anchors       the layouts to measure whole
"""
