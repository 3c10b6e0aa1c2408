"""Inside MindSpeed-MM's native FSDP2 trainer: measure its modules, plan, and train under a plan.

``entry``      dispatches on the flags after the YAML's name
``trainer``    the running trainer's classes and arguments
``modules``    the modules of a model that a plan covers
``timeline``   forward and backward of each module alone, without gathers, by hooks
``saved``      bytes that each module keeps for backward, and attention operators
``measuring``  measures steps
``profile``    the profile of the measured steps, also at sizes that were not measured
``search``     measure, then write plan and YAML
``apply``      applies a plan to the trainer's arguments, and compares prediction with measurement
``preflight``  runs single ranks on this device, one after the other, and reports a verdict
``rank_alone`` its child process: fake process groups, measured steps
"""
