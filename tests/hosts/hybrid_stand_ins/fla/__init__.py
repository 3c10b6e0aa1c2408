"""flash-linear-attention's names that Megatron's gated delta nets train through, in plain torch; not the library."""
