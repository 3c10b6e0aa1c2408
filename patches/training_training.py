"""megatron.training.training: measuring takes over, an applied plan is checked, encoders get their own layout."""

from mindspeed_autoparallel.patching import Calls, Patch
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE

_SEARCH = ("--auto-parallel-mm", "--auto-tuning", TASK_VARIABLE)
"""The searches refuse a host whose training their measuring processes cannot take over."""
HETERO_FLAGS = ("--hetero-parallel", "--auto-parallel-hetero")
TRAINING_FLAGS = (*_SEARCH, "--auto-parallel-plan", *HETERO_FLAGS)
PREFLIGHT_FLAGS = ("--auto-parallel-preflight",)
STEP_FLAGS = ("--auto-parallel-plan", "--auto-tuning", TASK_VARIABLE)
WATCHED_BY = ("--auto-parallel-plan",)
"""A plan sets its arguments after parsing; during training it only compares the first steps with the plan."""


TAKE_OVER = Calls("runtime.profiling.measure.worker:take_over_training")
"""Measures instead of training in a measuring process, around a host's ``train``."""
WATCH_STEP = Calls("runtime.features.apply_plan.check:watch_step")
"""Watches the first steps of a training under a plan, around a host's ``train_step``."""
LOG_ITERATION = Calls("runtime.hetero.reporting:log")
"""Adds the encoders' times to the host's own line, around its ``training_log``."""


def _recorded(name: str) -> Calls:
    return Calls("runtime.profiling.measure.worker:record", (name,))


PATCHES = [
    Patch(
        target="megatron.training.training:setup_model_and_optimizer",
        wrapper=_recorded("setup_model_and_optimizer"),
        flags=_SEARCH,
        why="A measuring process builds the host's model again for the next layout, as the host built it.",
    ),
    Patch(
        target="megatron.training.training:build_train_valid_test_data_iterators",
        wrapper=_recorded("build_data_iterators"),
        flags=_SEARCH,
        why="A measuring process needs the host's data again for the next layout.",
    ),
    Patch(
        target="megatron.training.training:train",
        wrapper=TAKE_OVER,
        parameters=("forward_step_func", "model", "optimizer", "train_data_iterator"),
        flags=TRAINING_FLAGS,
        watched_by=WATCHED_BY,
        why="A measuring process measures where training would begin, and ends; elsewhere patches are checked there.",
    ),
    Patch(
        target="megatron.training.training:train_step",
        wrapper=WATCH_STEP,
        parameters=("forward_step_func", "data_iterator", "model"),
        flags=STEP_FLAGS,
        watched_by=WATCHED_BY,
        why="Predicted step time and memory are compared with the first steps of the training.",
    ),
    Patch(
        target="megatron.training.training:get_model",
        wrapper=Calls("runtime.hetero.building:build_model"),
        parameters=("model_provider_func",),
        flags=HETERO_FLAGS,
        why="Encoders are built on every rank under their own layout and attached to the host's model.",
    ),
    Patch(
        target="megatron.training.training:training_log",
        wrapper=LOG_ITERATION,
        parameters=("iteration",),
        flags=HETERO_FLAGS,
        why="The time of each phase and the bytes moved are logged with the iteration.",
    ),
    Patch(
        target="megatron.training.training:train_step",
        wrapper=Calls("runtime.features.preflight.watch:train_step"),
        parameters=("forward_step_func", "data_iterator", "model", "optimizer"),
        flags=PREFLIGHT_FLAGS,
        why="The steps of a rank that runs alone are measured, and the process ends after them.",
    ),
    Patch(
        target="megatron.training.training:training_log",
        wrapper=Calls("runtime.features.preflight.watch:log_nothing"),
        flags=PREFLIGHT_FLAGS,
        why="The losses of a rank that runs alone are meaningless.",
    ),
    Patch(
        target="megatron.training.training:build_train_valid_test_data_iterators",
        wrapper=Calls("runtime.features.preflight.watch:build_data"),
        flags=PREFLIGHT_FLAGS,
        why="Data sets that rank 0 builds for the others are built by the rank that runs alone.",
    ),
]
