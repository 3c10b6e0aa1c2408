"""Costs of the user's own model: measured on devices, traced on fake tensors, or calibrated operator by operator."""
