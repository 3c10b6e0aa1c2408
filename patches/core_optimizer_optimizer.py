"""megatron.core.optimizer.optimizer: optimizer state of experts between EP 1 and EP above 1."""

from mindspeed_autoparallel.patching import Calls, Patch

PATCHES = [
    Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
        wrapper=Calls("runtime.megatron.expert_optimizer:load_state"),
        parameters=("state_dict",),
        flags=("--auto-parallel-plan",),
        why="EP above 1 gives experts a separate optimizer: a plan with another EP joins or divides the state.",
    )
]
