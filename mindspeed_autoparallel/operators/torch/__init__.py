"""The half of operator search that imports torch: execution of a plan on real processes."""
