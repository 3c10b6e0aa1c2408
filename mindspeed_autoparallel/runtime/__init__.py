"""Everything that touches torch and megatron.

megatron    hooks in the host's functions: parsing, the description of the model, plans as Megatron's arguments
flags       the command line flags of every feature, as data, and how they join the host's parser
devices     one interface for npu, cuda and cpu, and an implementation of each
launch      coordinator, agents on the other nodes, and the processes they start
profiling   the work of those processes: ``measure`` on devices, ``trace`` on fake tensors, ``calibrate`` operators
hetero      per-module layouts: snapshots, redistribution, phases around Megatron's schedule
attention   context-parallel attention
fsdp2       MindSpeed-MM's native FSDP2 trainer: measure, plan, pre-flight, train under a plan
doctor      diagnoses a node or a launch script
features    one folder per flag, from the parsed arguments to the files it writes
"""
