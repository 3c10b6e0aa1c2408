"""``--auto-tuning``: the user's own model traced in every layout on one process, unknown operators measured once.

``entry``, ``request``          the three stages in order; the flags, checked; ``lock``: one run per work dir
``dimensions``                  what is searched on this host, and why the rest is not
``launches``                    every launch, with its id and how it ended
``trace_store``, ``calibration``, ``calibration_result``  what is known already, and what one launch adds
``modelling``, ``recommend``    profiles of the traced model; search, and Megatron's own word on what was found
``argv``, ``output``            Megatron's flags; JSON, table, pages
``verify``, ``verify_worker``   the recommended configurations, run

The processes it starts run ``runtime.profiling``.
"""
