"""``--auto-parallel-preflight``: each distinct rank of a plan, or of the script's own layout, alone on one device.

``request``   the flags, checked, with the layout of the script's own flags or its model.json
``ranks``     which ranks hold the same, which are run, and the task of each child process
``source``    starts one child per distinct rank and reads what it measured
``apply``     the child's side: arguments, fake process groups, the features of the plan
``watch``     the child's steps: peaks by place, times by pass
``memory``    peaks of device memory by place
``entry``     all steps in order: the verdict, the step by replay, what would help, the report
"""
