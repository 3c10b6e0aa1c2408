"""Everything that touches torch and megatron.

arguments   the command line flags of every feature, as data, and how they join the host's parser
devices     what npu, cuda and cpu have in common, and how each does it
launch      coordinator, agents on the other nodes, and the processes they start
measuring   block costs of the host's own model, measured in the host's own training step
search      ``--auto-parallel-mm`` from flags to plan
applying    ``--auto-parallel-plan``: a plan becomes the host's arguments, and is checked against what runs
"""
