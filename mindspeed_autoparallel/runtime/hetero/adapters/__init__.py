"""How a host model names its items and takes its embeddings; ``protocol`` is what every adapter offers."""
