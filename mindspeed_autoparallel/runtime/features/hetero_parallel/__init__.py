"""``--hetero-parallel``: sets up a training whose modules each have their own layout."""
