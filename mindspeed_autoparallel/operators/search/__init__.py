"""The search modes over one graph and one cost model."""
