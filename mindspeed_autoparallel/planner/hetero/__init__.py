"""Encoders with separate layouts: the cost of their phases, the search over them, the comparison.

encoder_costs  cost of one encoder's batches, whole or by stage
encoders       price of one encoder in one layout
space          encoder layouts worth trying with a backbone layout
backbone       the pipeline solved with less memory
choice_search  how choices of all layouts are refined, best first
windowed       memory mode window, tried in addition
solved         one solved choice
search         the whole search
gain           the separate gains of layouts, batch scale and recomputing
assembly       the plan file of the best choice
compare        the hetero plan compared with the homogeneous plan
"""
