"""``--auto-tuning``: the user's own model traced in every layout on one process, unknown operators measured once.

``entry``, ``request``          the three stages in order; the flags, checked
``dimensions``                  what is searched on this host, and why the rest is not
``launches``                    every launch, with its id and how it ended
``trace_store``, ``calibration``, ``calibration_result``  what is known already, and what one launch adds
``source``, ``modelling``       stages one and two: traces, and profiles of the traced model
``search``, ``argv``            the search, and Megatron's own word on what was found; its flags
``write``                       JSON, table, pages
``verify``, ``verify_worker``   the recommended configurations, run

The processes it starts run ``runtime.profiling``.
"""
