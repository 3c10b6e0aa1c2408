"""``--auto-parallel-elastic``: torchrun restarts the processes, and they continue under the best plan for their
number."""
