"""Where the host's own functions meet ours: what the patch sheets of megatron.training call."""
