"""Everything that touches torch and megatron.

megatron    where the host's own functions meet ours: parsing, what model was asked for, plans as Megatron's arguments
flags       the command line flags of every feature, as data, and how they join the host's parser
devices     what npu, cuda and cpu have in common, and how each does it
launch      coordinator, agents on the other nodes, and the processes they start
profiling   what runs in those processes: ``measure`` on devices, ``trace`` on fake tensors, ``calibrate`` operators
hetero      per-module layouts: snapshots, redistribution, phases around Megatron's schedule
attention   context-parallel attention
doctor      what is wrong with a node or a launch script
features    one folder per flag, from the parsed arguments to the files it writes
"""
