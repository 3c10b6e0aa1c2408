"""Encoders under layouts of their own: what their phases cost, the search over them, the comparison.

encoder_costs  what one encoder's batches cost, whole or by stage
encoders       price of one encoder in one layout
space          what is worth trying beside a backbone layout
backbone       the pipeline solved with less memory
choice_search  how choices of all layouts are refined, best first
windowed       memory mode window tried beside them
solved         one solved choice
search         the whole search
gain           what layouts, batch scale and recomputing bring, each for itself
assembly       the plan file of the best choice
compare        the hetero and the homogeneous plan beside each other
"""
