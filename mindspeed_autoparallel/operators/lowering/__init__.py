"""Lowering: the Megatron configuration nearest to a plan per operator."""
