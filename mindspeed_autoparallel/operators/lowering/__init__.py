"""From a plan per operator to what frameworks can be told: one Megatron configuration, or its nearest."""
