"""Launches processes on every node: the coordinator on node 0 decides, agents on the other nodes follow its orders.

``Coordinator.launch(spec)`` runs the user's script once on all devices and returns the outcome. It raises no exception
for a launch that fails, hangs or runs out of memory, because that is a data point.
Every rank loads a part of this package, so nothing is imported here.
"""
