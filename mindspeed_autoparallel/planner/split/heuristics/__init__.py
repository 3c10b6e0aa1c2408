"""Good plans without a proof: simple splits, descents, perturbations."""
