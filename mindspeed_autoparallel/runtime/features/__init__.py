"""A folder per feature, each with the same files.

``flags``, ``entry``            its flags; what is called once the host has parsed them
``request``                     the flags and the host's arguments, checked, as one record
``source``, ``search``, ``write``  where it searches: what the search reads, the search, the files
``apply``                       where it trains: the request put into the host's arguments and this process
"""
