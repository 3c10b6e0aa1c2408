"""``--operator-plan``: training with the Megatron configuration that an operator search derived."""
