"""From a plan per operator to a framework's configuration: one of Megatron's, or the nearest."""
