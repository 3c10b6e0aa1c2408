"""Inside MindSpeed-MM's native FSDP2 trainer: measure its modules, plan, and train by a plan.

``entry``      what the flags behind the YAML's name ask for
``trainer``    the trainer's classes and arguments, as a plugin finds them
``modules``    which modules of a model are decided about
``timeline``   forward and backward of each module alone, without gathers, by hooks
``saved``      bytes that each module keeps for backward
``measuring``  a step measured, and the profile of it
``divided``    costs at Ulysses and expert sizes that were not run
``search``     measure, then ``write`` plan and YAML
``apply``      the trainer's arguments changed to those of a plan, and predicted beside measured
``preflight``  a rank or several alone on this device, one after the other, and the verdict
``rank_alone`` the child's side of it: fake process groups, steps that are measured
"""
