"""Inside MindSpeed-MM's native FSDP2 trainer: measure its modules, plan, and train under a plan.

``entry``      dispatches on the flags after the YAML's name
``trainer``    the trainer's classes and arguments, as a plugin finds them
``modules``    the modules of a model that a plan covers
``timeline``   forward and backward of each module alone, without gathers, by hooks
``saved``      bytes that each module keeps for backward
``measuring``  measures steps
``divided``    costs at Ulysses and expert sizes that were not run
``search``     measure, then ``write`` plan and YAML
``apply``      applies a plan to the trainer's arguments, and compares prediction with measurement
``preflight``  runs ranks alone on this device, one after the other, and reports a verdict
``rank_alone`` its child process: fake process groups, measured steps
"""
