"""Encoders with separate layouts: costs of their phases, the search over layouts, and the comparison.

encoder_costs   cost of one encoder's batches, whole or by stage
encoder_memory  macro-batches of one encoder, and their memory
encoders        price of one encoder in one layout
generator       price of a generator in one layout
space           encoder layouts worth trying with a backbone layout
backbone        the pipeline solved with less memory
tight           exact search of a backbone with little memory
choice_search   refinement of the choices of all layouts, best first
windowed        memory mode window, tried in addition, and its bounds; ``device_work``: bounds by each device's compute
search          the whole search, and the separate gains of layouts, batch scale and recomputation
assembly        one solved choice, and the plan file of the best
compare         the hetero plan compared with the homogeneous plan
"""
