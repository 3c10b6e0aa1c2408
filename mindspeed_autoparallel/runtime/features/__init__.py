"""One package per feature. Modules of the same name have the same role; short ones are part of ``entry``.

``flags``, ``entry``            the flags; the function that receives the host's parsed arguments
``request``                     the flags and the host's arguments as one checked record
``source``, ``search``, ``write``  of a search: its input, the search, its files
``apply``                       of a training: applies the request to the host's arguments and this process
"""
