"""Measure collectives, operators and whole layouts on devices, for the knowledge base."""
