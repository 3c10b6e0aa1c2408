"""The dimensions to search on this host, and the reasons for leaving out others.

``planning``    sizes and switches of optimizer and schedule, and all dimensions together: ``plan_search``
``variants``    variants of the same layers, and recompute: each is traced
``modelled``    switches that only accelerators run: their effect is computed
"""
