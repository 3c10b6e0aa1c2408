"""One folder per feature flag: ``request`` checks what was asked, ``entry`` runs it, ``output`` writes the result."""
