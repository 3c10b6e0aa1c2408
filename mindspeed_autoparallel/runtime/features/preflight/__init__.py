"""``--auto-parallel-preflight``: runs each distinct rank of a plan or of the script's layout alone on one device.

``request``   the flags, checked, with the layout of the script's own flags or its model.json
``ranks``     groups of ranks with equal memory, the ranks to run, and the task of each child process
``source``    starts one child per selected rank and reads its result
``apply``     set-up of a child: arguments, fake process groups, the features of the plan
``watch``     the child's steps: peaks by place, times by pass
``memory``    peaks of device memory by place
``entry``     all steps in order: the runs, the verdict, the replayed step, advice, the report
"""
