"""``--auto-tuning``: the user's own model traced in every layout on one process, unknown operators measured once.

From the flags to the files:

``entry``, ``request``         the three stages in order; the flags, checked; ``lock``: one run per work dir
``dimensions``                 what is searched on this host, and why the rest is not
``launches``                   every launch, with its id and how it ended
``traces``, ``calibration``    what is known already, what one launch adds; ``calibrate``: without a script
``modelling``, ``recommending``  profiles of the traced model; search, and Megatron's own word on what was found
``argv``, ``result``           Megatron's flags; JSON, table, pages
``verification``               the recommended configurations, run

In the processes that are started:

``tracing``, ``pretending``    every layout, where ranks, tensors and routing (``balance``) are pretended
``calibrating``, ``replay``    collectives, operators and whole layouts on the devices
``verifying``                  a few watched steps of a training

``calls`` is what both sides write an operator as; ``fingerprint`` is what the knowledge base keeps it under.
"""
