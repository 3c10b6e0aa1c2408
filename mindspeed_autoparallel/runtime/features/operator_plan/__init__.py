"""``--operator-plan``: training by the Megatron configuration that an operator search derived."""
