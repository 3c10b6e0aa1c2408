"""The number of pipeline stages: chosen by memory when requested, otherwise suggested in the log."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.operators.config import SearchOptions
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.pricing import plan_resident_bytes
from mindspeed_autoparallel.operators.search.recursive import carried_axes
from mindspeed_autoparallel.operators.search.state import Decisions, device_factors
from mindspeed_autoparallel.operators.strategies import search_graph
from mindspeed_autoparallel.spec.legality import too_many_stages
from mindspeed_autoparallel.units import counted

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pipeline:
    """Inputs for the choice of the number of stages. ``stages``: the user's number; ``servers``: number of machines."""

    stages: int = 1
    servers: int = 1
    micro_batch_num: int = 1
    device_memory_bytes: int = 64 * 2**30


def stage_bytes(decisions: Decisions, given: Pipeline, stages: int) -> tuple[float, float]:
    """Return the bytes of one device of the first stage: all, and those of outputs kept for backward.

    The stage keeps the outputs of one microbatch per stage.
    """
    at_once = given.micro_batch_num / min(stages, given.micro_batch_num)
    needed = plan_resident_bytes(decisions, at_once) / stages
    return needed, needed - plan_resident_bytes(decisions, math.inf) / stages


def num_layers(graph: Graph) -> int:
    """Return how often the most repeated matrix product occurs; 0 if none repeats and the number of layers is
    unknown."""
    repeated = Counter(node.role for node in graph.nodes.values() if node.matmul and node.role)
    most = max(repeated.values(), default=0)
    return most if most > 1 else 0


def choose_stages(
    graph: Graph, devices: int, given: Pipeline, plans: Callable[[int], Iterable[OperatorPlan]]
) -> tuple[int, OperatorPlan, str]:
    """Return the largest number of stages with a plan that fits, that plan, and a note if an earlier plan did not fit.

    ``plans``: for a number of stages, the searched plans to try, in order of preference. The numbers are powers of two
    that divide ``devices``, up to min(max(user stages, servers), micro_batch_num, layers). Raises ``InfeasiblePlan``,
    with the least memory of any plan, if none fits.
    """
    bound = min(max(given.stages, given.servers), given.micro_batch_num, num_layers(graph) or devices)
    stages = 1
    while stages * 2 <= bound and devices % (stages * 2) == 0:
        stages *= 2
    needs: list[tuple[float, float, int]] = []
    most = stages
    while stages:
        for plan in plans(stages):
            needed, kept = stage_bytes(plan.decisions, given, stages)
            if needed <= given.device_memory_bytes:
                return stages, plan, f"{_least(needs, most, given)}: too much." if needs else ""
            needs.append((needed, kept, stages))
        stages //= 2
    raise InfeasiblePlan(
        f"no number of pipeline stages up to {bound} fits: the least is {_least(needs, min(needs)[2], given)}"
        + (f", {_least(needs, most, given)}" if min(needs)[2] != most else "")
        + f"; {given.device_memory_bytes / 2**30:.1f} GiB are available. Raise mem_coeff, micro_batch_num or devices."
    )


def _least(needs: list[tuple[float, float, int]], stages: int, given: Pipeline) -> str:
    needed, kept, _ = min(need for need in needs if need[2] == stages)
    in_flight = min(stages, given.micro_batch_num)
    return (
        f"{needed / 2**30:.1f} GiB per device with {counted(stages, 'pipeline stage')} ({kept / 2**30:.1f} of them are "
        f"outputs of {in_flight} of {given.micro_batch_num} microbatches, kept for backward)"
    )


def search_pipelined(
    graph: Graph, devices: int, *, auto_pipeline: bool = False, pipeline: Pipeline | None = None, **options: Any
) -> OperatorPlan:
    """Search ``graph`` over the devices of one stage and return the plan, with the number of ``stages``.

    With ``auto_pipeline`` that number is chosen (``choose_stages``); otherwise it is the user's, and a note suggests
    the number that would be chosen. With several stages, rows are cut into no more parts than a microbatch has
    samples. Raises ``ConfigError`` for stages that do not divide the devices, or exceed ``micro_batch_num`` or the
    number of layers.
    """
    given = pipeline or Pipeline()
    for name in ("stages", "servers", "micro_batch_num", "device_memory_bytes"):
        if getattr(given, name) < 1:
            raise ConfigError(f"{name}={getattr(given, name)}: give 1 or more.")
    if given.stages > given.micro_batch_num:
        raise ConfigError(
            f"{given.stages} pipeline stages need at least as many microbatches, not {given.micro_batch_num}."
        )
    layers = num_layers(graph)
    if layers and (reason := too_many_stages(given.stages, layers)):
        raise ConfigError(reason)
    if devices % given.stages:
        raise ConfigError(f"{given.stages} pipeline stages do not divide {devices} devices.")
    options.setdefault("memory_limit_bytes", given.device_memory_bytes)
    searches = _Searches(graph, devices, given, options)
    stages, note = given.stages, ""
    if auto_pipeline:
        stages, plan, note = choose_stages(graph, devices, given, searches.plans)
    else:
        plan = next(searches.plans(stages))
        note = _suggestion(graph, devices, given, searches)
    if note:
        _LOG.info(note)
    notes = (*plan.notes, *([note] if note else []))
    return dataclasses.replace(plan, stages=stages, num_microbatches=given.micro_batch_num, notes=notes)


class _Searches:
    """Searches over the devices of one stage, each run once."""

    def __init__(self, graph: Graph, devices: int, given: Pipeline, options: dict[str, Any]) -> None:
        self._graph, self._devices, self._given, self._options = graph, devices, given, options
        self._found: dict[tuple[int, int | None, str], OperatorPlan] = {}
        self._mode = options.get("search_mode", SearchOptions.search_mode)

    def plans(self, stages: int, mode: str = "") -> Iterator[OperatorPlan]:
        """Yield the plan of ``stages``. Recursive programming has no memory limit, so it also yields plans with rows
        cut into ever fewer parts, and weights into more."""
        mode = mode or self._mode
        most = max(1, self._graph.samples // self._given.micro_batch_num) if stages > 1 else None
        yield self._plan(stages, most, mode)
        parts = min(most or self._devices, self._devices // stages) // 2 if mode == SearchOptions.search_mode else 0
        while parts:
            yield self._plan(stages, parts, mode)
            parts //= 2

    def _plan(self, stages: int, most: int | None, mode: str) -> OperatorPlan:
        key = (stages, most, mode)
        if key not in self._found:
            options = {**self._options, "search_mode": mode, "most_row_parts": most}
            if mode != self._mode:
                options.pop("parameter_limit_bytes", None)  # not supported by that mode
            if stages > 1:
                options["num_microbatches"] = self._given.micro_batch_num
                # The graph contains all stages, so its limit is that of all stages.
                options["memory_limit_bytes"] = (options["memory_limit_bytes"] or 0) * stages or None
            self._found[key] = search_graph(self._graph, self._devices // stages, **options)
        return self._found[key]


def _suggestion(graph: Graph, devices: int, given: Pipeline, searches: _Searches) -> str:
    """Return a note on the number of stages that ``auto_pipeline`` would choose with recursive programming; empty if
    the devices are not a power of two."""
    if set(device_factors(devices)) - {2}:
        return ""
    try:
        found, _, _ = choose_stages(
            graph, devices, given, lambda n: itertools.islice(searches.plans(n, SearchOptions.search_mode), 1)
        )
    except InfeasiblePlan as error:
        return f"auto_pipeline has no suggestion: {error}"
    suggested, configured = (counted(number, "pipeline stage") for number in (found, given.stages))
    return f"auto_pipeline suggests {suggested}; configured: {configured}."


def data_parallel(graph: Graph, devices: int) -> OperatorPlan:
    """Return the plan of ``parallel_mode`` 0: every operator is cut only by its batch; parameters are not cut.

    Raises ``ConfigError`` if the devices do not divide the batch of an operator.
    """
    axes = carried_axes(graph)
    decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    for parts in device_factors(devices):
        chosen = {}
        for name, node in graph.nodes.items():
            chosen[name] = axes.get(name, NO_CUT)
            if chosen[name] not in node.choices(parts, decisions.cuts(name)):
                size = node.axes[axes[name]].size
                raise ConfigError(
                    f"parallel_mode 0: the batch of {name} is {size}, which {devices} devices do not divide. Raise the "
                    "batch or use parallel_mode 2."
                )
        decisions = decisions.extend(parts, chosen)
    return OperatorPlan(decisions, "data_parallel", (), 0.0)
