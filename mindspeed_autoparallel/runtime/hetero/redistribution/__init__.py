"""The redistribution plan: pure Python, the same on every rank, no torch.

placement  items, the coordinates of ranks in a module's layout, and the rows of an item that each rank keeps
plan       which replica computes which item, and which rows go from which rank to which rank
"""
