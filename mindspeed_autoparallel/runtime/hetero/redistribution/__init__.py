"""The redistribution plan: pure Python, the same on every rank, no torch.

items      images and clips, and ranges of their rows
placement  where each rank sits in a module's layout
balance    which encoder replica computes which item
shards     which of an item's rows a first-stage rank keeps under sequence and context parallelism
plan       which rows go from which rank to which rank
"""
