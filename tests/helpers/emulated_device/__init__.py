"""A device without hardware: Megatron's own pipeline schedules on real gloo processes, computing by a virtual clock.

Every rank has a clock. A stage's forward and backward only advance it. Messages are Megatron's own calls and travel over
gloo for real; what they do to the clocks is what rendezvous messages of an accelerator do. The result is exact to the
nanosecond and does not depend on the machine's load. See docs/decisions/0008-emulated-device.md.

``cases`` says what to run (pure data), ``worker`` runs it on one rank, ``launching`` starts the ranks and gathers.
"""
