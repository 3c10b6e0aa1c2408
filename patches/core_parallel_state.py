"""megatron.core.parallel_state: how the host set its groups up is remembered for the next layout."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE


def _initialize(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.profiling.measure.worker import record

    return record("initialize_model_parallel", wrapped, args, kwargs)


def _initialize_all(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    from mindspeed_autoparallel.runtime.hetero.job import initialize_groups

    return initialize_groups(wrapped, args, kwargs)


def _tie(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.megatron.shared_embedding import tie_first_and_last

    return tie_first_and_last(wrapped, args, kwargs)


PATCHES = [
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrapper=_initialize,
        parameters=("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        flags=("--auto-parallel-mm", "--auto-tuning", TASK_VARIABLE),
        why="A measuring process sets the groups up again with another tensor-parallel size, and all else the same.",
    ),
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrapper=_initialize_all,
        versions=">=0.12,<0.21",
        parameters=("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="The groups of every module with a layout of its own are made beside the backbone's.",
    ),
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrapper=_tie,
        versions=">=0.12,<0.21",
        parameters=("get_embedding_ranks",),
        flags=("--auto-parallel-plan",),
        why="MindSpeed-MM's language model may begin after the first stage: its embedding is tied from there.",
    ),
]
