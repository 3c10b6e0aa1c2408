"""Families of models as tables of names and shapes: no family-specific code.

    catalogue    the tables of a ``model_type``, their names and exceptions
    sizes        the symbols in shapes and their keys in config.json
    conditions   the rows that a model, and each of its layers, has
    resolve      combines tables, sizes and conditions to the rules of one model

Rows of language models are in ``text.table``, those of vision and audio encoders in ``encoder.table``.
"""
