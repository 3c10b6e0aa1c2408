"""Adapters find the items in a host's batches and form their embeddings; ``protocol`` has the interface."""
