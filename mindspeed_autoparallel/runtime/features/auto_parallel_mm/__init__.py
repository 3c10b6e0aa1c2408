"""``--auto-parallel-mm``: checks flags, measures points, builds a profile, searches a plan, writes the results."""
