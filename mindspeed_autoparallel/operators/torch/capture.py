"""Capture of a PyTorch or megatron-core module as an operator graph, through ``torch.export``."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor

from mindspeed_autoparallel.errors import ConfigError, first_line
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.torch.causes import noting_causes
from mindspeed_autoparallel.operators.torch.compare import compare, has_values
from mindspeed_autoparallel.operators.torch.decompositions import simplified
from mindspeed_autoparallel.operators.torch.graph_builder import Captured, GraphBuilder

__all__ = ["Captured", "capture", "capture_program"]


def capture(
    model: torch.nn.Module, example_inputs: tuple[Any, ...], example_keywords: Mapping[str, object] | None = None
) -> Graph:
    """Return the operators of one forward; parameters keep their names, operators are named by the calling module.

    Nothing is computed if parameters and inputs are on the meta device. Operators without a rule are listed in
    ``Graph.unknown`` and never cut. Layers of one list carry equal roles, so the search can tie them. Raises
    ``ConfigError`` if the module cannot be captured, with the line of the model and a remedy.
    """
    return capture_program(model, example_inputs, example_keywords).graph


def capture_program(
    model: torch.nn.Module, example_inputs: tuple[Any, ...], example_keywords: Mapping[str, object] | None = None
) -> Captured:
    """Capture as ``capture`` does, with the calls that make up the operators (see ``PlannedModule``).

    A module with values is compared with its capture (``compare``): different results or gradients raise
    ``ConfigError``.
    """
    try:
        with _random_states_left_alone(), noting_causes(model) as causes:
            program = torch.export.export(model, tuple(example_inputs), example_keywords, strict=False)
            captured = GraphBuilder(simplified(program), model).build()
    except ConfigError:
        raise
    except Exception as error:  # the model's own code can raise anything under tracing; the message gives the line
        raise ConfigError(_broken(model, error)) from error
    finally:
        _forget_traced(model)
    captured.causes = causes
    if has_values(captured, model):
        try:
            compare(captured, model)
        except ConfigError:
            if causes:
                raise
            # Some of torch's decompositions differ from their operators in edge cases: capture without them.
            captured = GraphBuilder(simplified(program, few=True), model).build()
            compare(captured, model)
    return captured


@contextlib.contextmanager
def _random_states_left_alone() -> Iterator[None]:
    """Disable Megatron's swaps of generator states around dropout: no operator of a graph can express them."""
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    trackers = [
        kind
        for name in ("CudaRNGStatesTracker", "TECudaRNGStatesTracker")
        if (kind := getattr(random, name, None)) is not None and "fork" in vars(kind)
    ]
    before = [kind.fork for kind in trackers]
    for kind in trackers:
        kind.fork = lambda self, name="": contextlib.nullcontext()
    try:
        yield
    finally:
        for kind, fork in zip(trackers, before, strict=True):
            kind.fork = fork


def _forget_traced(model: torch.nn.Module) -> None:
    """Empty the ``functools`` caches of the model's packages, and Megatron's scratch memory.

    Tensors made under tracing, such as a causal mask, have no values and must not be reused.
    """
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch"}
    for cached in gc.get_objects():
        # type(), not isinstance: a proxy of a dead object raises on any access.
        if type(cached) is functools._lru_cache_wrapper and str(cached.__module__).partition(".")[0] in packages:
            cached.cache_clear()
    state = sys.modules.get("megatron.core.parallel_state")
    scratch = getattr(getattr(state, "_GLOBAL_MEMORY_BUFFER", None), "buffer", {})
    for key in [key for key, value in scratch.items() if isinstance(value, FakeTensor)]:
        del scratch[key]


def _broken(model: torch.nn.Module, error: BaseException) -> str:
    inside = str(Path(torch.__file__).parent)
    own = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((inside, own, "<"))]
    place = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "its forward"
    reason = first_line(error)
    return (
        f"capture of {type(model).__name__} breaks at {place}: {reason}. A graph cannot depend on values of tensors: "
        "use torch.where there, or move that code out of the module and capture the rest."
    )
