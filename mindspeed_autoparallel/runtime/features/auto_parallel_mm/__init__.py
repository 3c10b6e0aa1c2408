"""``--auto-parallel-mm``: checks flags, measures points, builds a profile, searches for a plan, writes the results."""
