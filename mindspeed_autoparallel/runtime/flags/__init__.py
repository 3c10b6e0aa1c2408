"""Command line flags: fields of a dataclass per feature (``features/*/flags.py``), added to the host's parser.

``flag``            a flag as a field; reading the fields back from parsed arguments
``registration``    adds the flags that the host's parser lacks
``shared``          the groups that several features read
``switches``        the flags that start a feature, and what each needs
"""
