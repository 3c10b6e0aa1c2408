"""megatron.training.checkpointing: random states of modules with their own layout."""

from mindspeed_autoparallel.patching import Calls, Patch

PATCHES = [
    Patch(
        target="megatron.training.checkpointing:save_checkpoint",
        wrapper=Calls("runtime.hetero.checkpoint:save"),
        parameters=("iteration",),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="The host saves the random states of one module; those of the encoders are saved next to them.",
    ),
    Patch(
        target="megatron.training.checkpointing:load_checkpoint",
        wrapper=Calls("runtime.hetero.checkpoint:load"),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="Encoders resume their random numbers from the checkpoint.",
    ),
]
