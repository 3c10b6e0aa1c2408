"""Looks at a node and a launch script and says what to set and why; changes nothing.

    node      what can be seen of a machine; the only place that looks, so that checks can be tried on a made-up one
    script    the variables and flags of a launch script
    shell, expansion    bash statements and words, as far as they can be told without running them
    finding   what a check says
    device, releases, ascend, cores, network, resources, launch    the checks, one small function each
    report    text, JSON, ``export`` lines

Needs neither torch nor megatron.
"""
