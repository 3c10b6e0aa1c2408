"""Search for a module: capture, then the search over its graph."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.operators.pipeline import search_pipelined
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.pins import Pins

if TYPE_CHECKING:
    import torch


def search_strategies(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    devices: int,
    search_mode: str = "recursive_programming",
    mem_coeff: float | None = None,
    pins: Pins | None = None,
    **options: Any,
) -> OperatorPlan:
    """Return a strategy for every operator of ``model`` as it runs on ``example_inputs`` (the batch of all devices).

    ``pins`` and the further ``options`` are those of ``search_pipelined``. Raises ``ConfigError`` if the module cannot
    be captured, with the line of the model. Notes of the plan list operators that have no rule.
    """
    from mindspeed_autoparallel.operators.torch.capture import capture

    graph = capture(model, example_inputs)
    plan = search_pipelined(graph, devices, search_mode=search_mode, mem_coeff=mem_coeff, pins=pins, **options)
    notes = list(plan.notes)
    if graph.unknown:
        listed = ", ".join(f"{name} ({kind})" for name, kind in graph.unknown.items())
        notes.append(f"no rule for {listed}: treated as replicated.")
    return dataclasses.replace(plan, notes=tuple(notes))
