"""``--auto-tuning``: the user's own model traced in every layout on one process, unknown operators measured once.

``entry``        from the parsed arguments to the files in the work dir
``request``      the flags, checked
``pretending``   a process where ranks, tensors and routing are pretended: nothing is computed
``tracing``      what runs in that process: every layout of the user's model
``calls``        operators and collectives as data: written by the trace, replayed on the device
``calibrating``  what runs on the device: missing operators, collectives, a few whole layers
"""
