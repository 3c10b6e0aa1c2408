"""Commands of ``mindspeed-autoparallel``: one command per file.

A command module has a docstring whose first line is its help, ``add_arguments(parser)`` and ``run(arguments) -> int``;
its module level has no heavy imports. ``main`` finds it by its file name (``_`` becomes ``-``).
"""
