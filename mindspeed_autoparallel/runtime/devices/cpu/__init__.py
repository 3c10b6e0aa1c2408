"""Unmodified Megatron on CPU and gloo: a facade of torch.cuda, undoable, in one file per concern."""
