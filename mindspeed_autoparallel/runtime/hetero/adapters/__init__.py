"""How to find a host model's items and insert their embeddings; ``protocol``: the interface of every adapter."""
