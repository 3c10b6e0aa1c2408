"""``--auto-tuning``: trace the user's model in every layout on one process, measure unknown operators once, search.

In the order of a run; ``entry`` lists the steps:

``flags``, ``request``    the flags, and a checked record of them
``dimensions``            the dimensions to search on this host, and why others are left out
``launches``              every launch of the run: its id, its processes, its outcome
``traces``                stage one: the traces of earlier runs, and the missing ones
``calibration``           the one launch that measures what the knowledge base lacks
``figures``               entries of the knowledge base for this model on this device
``costs``                 the result: measured costs, or costs computed from the catalogue
``source``                stage two: a profile of the model for each variant of its layers
``switching``             the same with switches that were never measured
``search``, ``by_samples``    stage three: the fastest configurations, for equal samples and for samples that differ
``recommendation``, ``argv``  a configuration as plan, flags and command line
``user_baseline``         the script's own configuration, priced for comparison
``write``                 JSON, table, pages
``verify``, ``verify_worker``  the recommended configurations, run for a few steps

The processes it starts run ``runtime.profiling``.
"""
