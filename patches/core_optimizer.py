"""megatron.core.optimizer: one optimizer over modules with different layouts."""

from mindspeed_autoparallel.patching import Calls, Patch

PATCHES = [
    Patch(
        target="megatron.core.optimizer:get_megatron_optimizer",
        wrapper=Calls("runtime.hetero.building:build_optimizer"),
        parameters=("config", "model_chunks"),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="Each module's parameters are stepped under its own groups; norm, clipping and loss scale are shared.",
    )
]
