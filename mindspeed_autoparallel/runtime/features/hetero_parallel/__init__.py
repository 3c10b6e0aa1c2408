"""``--hetero-parallel``: joins a training whose modules each have a layout of their own."""
