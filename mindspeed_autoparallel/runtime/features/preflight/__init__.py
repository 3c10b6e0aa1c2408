"""``--auto-parallel-preflight``: each distinct rank of a plan, or of the script's own layout, alone on one device.

``request``   the flags, checked
``script_layout``  the layout of the script's own flags, or of its model.json
``ranks``     which ranks hold the same, and which are run
``task``      what a child process gets, and what it writes
``source``    starts one child per distinct rank and reads what it measured
``apply``     the child's side: arguments, fake process groups, the features of the plan
``watch``     the child's steps: peaks by place, times by pass
``memory``    peaks of device memory by place
``conclude``  the verdict, the step by replay, and what would help
``write``     the result as a file, and for people
``entry``     these in order; then the process ends
"""
