"""Diagnoses a node and a launch script: what to set and why. Changes nothing.

    node      the readable state of a machine; checks read nothing else, so that tests can pass a fake one
    finding   the result of a check; findings as text, JSON and ``export`` lines
    machine, settings, launch, native    the checks, one small function each
    examine   checks of releases and patches, and all checks in the order of the report

Needs neither torch nor megatron.
"""
