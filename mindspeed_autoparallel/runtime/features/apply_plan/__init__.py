"""``--auto-parallel-plan``: a plan becomes the host's arguments and model.json, and is checked against the run."""
