"""megatron.training.training: measuring takes over, an applied plan is checked, encoders get their own layout."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch, Wrapper
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE

_SEARCH = ("--auto-parallel-mm", "--auto-tuning", TASK_VARIABLE)
"""The searches refuse a host that their measuring processes could not take over."""


def _recording(name: str) -> Wrapper:
    def wrapper(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        from mindspeed_autoparallel.runtime.profiling.measure.worker import record

        return record(name, wrapped, args, kwargs)

    return wrapper


def _train(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.profiling.measure.worker import take_over_training

    return take_over_training(wrapped, args, kwargs)


def _train_step(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.features.apply_plan.check import watch_step

    return watch_step(wrapped, args, kwargs)


def _get_model(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.hetero.building import build_model

    return build_model(wrapped, args, kwargs)


def _log(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.hetero.reporting import log

    return log(wrapped, args, kwargs)


SHEET = [
    Patch(
        target="megatron.training.training:setup_model_and_optimizer",
        wrapper=_recording("setup_model_and_optimizer"),
        flags=_SEARCH,
        why="A measuring process builds the host's model again for the next layout, as the host built it.",
    ),
    Patch(
        target="megatron.training.training:build_train_valid_test_data_iterators",
        wrapper=_recording("build_data_iterators"),
        flags=_SEARCH,
        why="A measuring process needs the host's data again for the next layout.",
    ),
    Patch(
        target="megatron.training.training:train",
        wrapper=_train,
        parameters=("forward_step_func", "model", "optimizer", "train_data_iterator"),
        flags=_SEARCH,
        why="A measuring process measures where training would begin, and ends.",
    ),
    Patch(
        target="megatron.training.training:train_step",
        wrapper=_train_step,
        parameters=("forward_step_func", "data_iterator", "model"),
        flags=("--auto-parallel-plan", "--auto-tuning", TASK_VARIABLE),
        why="Predicted step time and memory are compared with the first steps of the training.",
    ),
    Patch(
        target="megatron.training.training:get_model",
        wrapper=_get_model,
        versions=">=0.12,<0.21",
        parameters=("model_provider_func",),
        flags=("--hetero-parallel",),
        why="Encoders are built on every rank under their own layout and hung on the host's model.",
    ),
    Patch(
        target="megatron.training.training:training_log",
        wrapper=_log,
        versions=">=0.12,<0.21",
        parameters=("iteration",),
        flags=("--hetero-parallel",),
        why="The time of each phase and the bytes moved are logged beside the iteration.",
    ),
]
