"""``--auto-parallel-mm``: flags are checked, points measured, a profile built, a plan searched, results written."""
