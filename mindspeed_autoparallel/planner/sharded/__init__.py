"""Search of FSDP2 trainings: sizes, switches, units, and one recompute policy per layer. See docs/fsdp2.md."""
