"""Functions that the patches of megatron.training call."""
