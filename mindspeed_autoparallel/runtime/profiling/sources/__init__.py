"""Sources of a ``Profile`` other than a file (``profiles.read_profile``): measured or traced results, or a catalogue.

``building``     a profile from the results of each layout, measured, or traced and priced
``device_cost``  costs of the device and its links: measured, from the catalogue, or assumed
``analytic``     a profile from shapes and datasheets; nothing is measured
"""
