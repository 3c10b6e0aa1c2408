"""A folder per feature, its steps in files of the same names; short steps stand in ``entry``.

``flags``, ``entry``            its flags; the function that the host's parsed arguments are handed to
``request``                     the flags and the host's arguments, checked, as one record
``source``, ``search``, ``write``  where it searches: what the search reads, the search, the files
``apply``                       where it trains: the request put into the host's arguments and this process
"""
