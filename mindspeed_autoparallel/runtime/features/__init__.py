"""A folder per feature, its steps in files of the same names; short steps are in ``entry``.

``flags``, ``entry``            its flags; the function that receives the host's parsed arguments
``request``                     the flags and the host's arguments, checked, as one record
``source``, ``search``, ``write``  for searches: their input, the search, the files
``apply``                       for trainings: applies the request to the host's arguments and this process
"""
