"""megatron.core.parallel_state: how the host set its groups up is remembered for the next layout."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _initialize(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.measuring.worker import record

    return record("initialize_model_parallel", wrapped, args, kwargs)


SHEET = [
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrapper=_initialize,
        parameters=("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        flags=("--auto-parallel-mm", "--auto-tuning"),
        why="A measuring process sets the groups up again with another tensor-parallel size, and all else the same.",
    )
]
