"""megatron.training.initialize: random states of modules with their own layout."""

from mindspeed_autoparallel.patching import Calls, Patch

PATCHES = [
    Patch(
        target="megatron.training.initialize:_set_random_seed",
        wrapper=Calls("runtime.hetero.job:seed"),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="Each module draws from a tracker seeded by its own tensor rank.",
    )
]
