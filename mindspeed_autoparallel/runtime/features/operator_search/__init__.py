"""``--operator-search`` and ``--operator-plan``: the operator search on the model that a Megatron script describes."""
