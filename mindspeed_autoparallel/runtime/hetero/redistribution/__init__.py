"""The redistribution plan: pure Python, the same on every rank, no torch.

placement  items, where each rank sits in a module's layout, and which of an item's rows it keeps
plan       which replica computes which item, and which rows go from which rank to which rank
"""
