"""mindspeed_mm.training: MindSpeed-MM has its own training loop; only the set-up functions are Megatron's."""

from mindspeed_autoparallel.patches.training_training import (
    HETERO_FLAGS,
    LOG_ITERATION,
    STEP_FLAGS,
    TAKE_OVER,
    TRAINING_FLAGS,
    WATCH_STEP,
    WATCHED_BY,
)
from mindspeed_autoparallel.patching import Patch

PATCHES = [
    Patch(
        target="mindspeed_mm.training:train",
        instead_of="megatron.training.training:train",
        wrapper=TAKE_OVER,
        distribution="mindspeed-mm",
        parameters=("forward_step_func", "model", "optimizer", "train_data_iterator"),
        flags=TRAINING_FLAGS,
        watched_by=WATCHED_BY,
        why="A measuring process measures where MindSpeed-MM's own training would begin, and ends.",
    ),
    Patch(
        target="mindspeed_mm.training:train_step",
        instead_of="megatron.training.training:train_step",
        wrapper=WATCH_STEP,
        distribution="mindspeed-mm",
        parameters=("forward_step_func", "data_iterator", "model"),
        flags=STEP_FLAGS,
        watched_by=WATCHED_BY,
        why="Predicted step time and memory are compared with the first steps of MindSpeed-MM's own training.",
    ),
    Patch(
        target="mindspeed_mm.training:training_log",
        instead_of="megatron.training.training:training_log",
        wrapper=LOG_ITERATION,
        distribution="mindspeed-mm",
        parameters=("iteration",),
        flags=HETERO_FLAGS,
        why="The time of each phase and the bytes moved are logged with MindSpeed-MM's iteration.",
    ),
]
