"""Step time and memory from shapes, a device of the catalogue, and nothing measured on the spot."""
