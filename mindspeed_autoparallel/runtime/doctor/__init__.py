"""Diagnoses a node and a launch script: what to set and why. Changes nothing.

    node      what can be seen of a machine; the only place that looks, so that checks can be tried on a made-up one
    finding   the result of a check
    device, releases, ascend, cores, network, resources, launch    the checks, one small function each
    report    text, JSON, ``export`` lines

Needs neither torch nor megatron.
"""
