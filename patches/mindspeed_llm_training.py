"""mindspeed_llm.training.training: MindSpeed-LLM replaces Megatron's training loop."""

from mindspeed_autoparallel.patches.training_training import (
    HETERO_FLAGS,
    LOG_ITERATION,
    TAKE_OVER,
    TRAINING_FLAGS,
    WATCHED_BY,
)
from mindspeed_autoparallel.patching import Patch

PATCHES = [
    Patch(
        target="mindspeed_llm.training.training:train",
        instead_of="megatron.training.training:train",
        wrapper=TAKE_OVER,
        distribution="mindspeed-llm",
        parameters=("forward_step_func", "model", "optimizer", "train_data_iterator"),
        flags=TRAINING_FLAGS,
        watched_by=WATCHED_BY,
        why="A measuring or tracing process begins where MindSpeed-LLM's own training would, and ends. Its steps are "
        "Megatron's.",
    ),
    Patch(
        target="mindspeed_llm.training.training:training_log",
        instead_of="megatron.training.training:training_log",
        wrapper=LOG_ITERATION,
        distribution="mindspeed-llm",
        parameters=("iteration",),
        flags=HETERO_FLAGS,
        why="The time of each phase and the bytes moved are logged with MindSpeed-LLM's iteration.",
    ),
]
