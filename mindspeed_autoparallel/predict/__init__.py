"""Predict step time and memory of a described training, with intervals, and search by those predictions."""
