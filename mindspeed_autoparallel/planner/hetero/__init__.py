"""Encoders under layouts of their own: what their phases cost, the search over them, the comparison.

``encoders`` prices one encoder in one layout, ``space`` lists what is worth trying beside a backbone layout,
``backbone`` solves the pipeline with less memory, ``search`` puts them together, ``compare`` adds the homogeneous plan.
"""
