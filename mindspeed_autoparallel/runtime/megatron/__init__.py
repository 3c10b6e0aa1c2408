"""Where the host's own functions meet ours: what the patches of megatron.training call."""
