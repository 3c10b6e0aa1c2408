"""Step time and memory computed from shapes and a device of the catalogue, without measurements."""
