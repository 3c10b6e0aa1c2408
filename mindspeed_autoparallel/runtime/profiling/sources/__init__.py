"""Sources of a ``Profile`` beside a file (``profiles.read_profile``): measured or traced results, or a catalogue.

``building``     a profile from the results of each layout, measured, or traced and priced
``device_cost``  device and links, if the measuring devices have them
``analytic``     a profile from shapes and datasheets; nothing is measured
"""
