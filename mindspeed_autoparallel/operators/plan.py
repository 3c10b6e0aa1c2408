"""The plan per operator, the result of a search, with the bytes of every edge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mindspeed_autoparallel.operators.graph.node import NO_CUT
from mindspeed_autoparallel.operators.search.pricing import edge_bytes
from mindspeed_autoparallel.operators.search.recursive import ExplainedCut
from mindspeed_autoparallel.operators.search.state import Decisions

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Bound:
    """The modelled step time of a plan, and a lower bound on that of every plan of ``scope``, in microseconds.

    ``scope``: the searched set of plans; ``method``: how the bound was found.
    """

    cost_us: float
    bound_us: float
    scope: str
    method: str

    @property
    def gap(self) -> float:
        """Return the share of the cost by which a plan of ``scope`` may still be cheaper; 0 if it is optimal."""
        return max(0.0, 1 - self.bound_us / self.cost_us) if self.cost_us else 0.0

    def as_json(self) -> dict[str, float | str]:
        """Return the proof as plain data."""
        return {**vars(self), "gap": self.gap}

    def line(self) -> str:
        if self.gap <= 1e-9:
            return f"optimal by the cost model over {self.scope} ({self.method})"
        return f"at most {self.gap:.1%} above the optimum over {self.scope} ({self.method})"


@dataclass(frozen=True)
class OperatorPlan:
    """Result of a search: every operator's choice per mesh dim, by ``search_mode``."""

    decisions: Decisions
    search_mode: str
    explained: tuple[ExplainedCut, ...]
    search_s: float
    notes: tuple[str, ...] = ()
    stages: int = 1
    num_microbatches: int = 1
    bound: Bound | None = None
    """Bound proved by the exact mode; None for the other modes."""
    repeat: Callable[[float], list[ExplainedCut]] | None = field(default=None, compare=False, repr=False)
    """Recursive programming: cuts the products again with another mem_coeff."""

    @property
    def devices(self) -> int:
        """Return the number of devices of all stages."""
        return self.stages * math.prod(self.decisions.mesh)

    def edge_bytes(self) -> dict[tuple[str, str, int], tuple[int, int]]:
        """Map each edge to the bytes (forward, backward) that one device sends in the steps of the executor.

        Readers that need a tensor in the same placement share one redistribution, counted at the first of them.
        """
        made = self.decisions
        result = {}
        seen = set()
        for producer, consumer, slot in made.graph.edges():
            wanted = made.wanted(producer.name, consumer.name, slot)
            moved = (0, 0)
            if (producer.name, wanted) not in seen:
                seen.add((producer.name, wanted))
                moved = edge_bytes(producer, made.output_placements(producer.name), *wanted, made.mesh)
            result[producer.name, consumer.name, slot] = moved
        return result

    def degrees(self) -> dict[str, dict[str, int]]:
        """Map every matrix product to the parts per axis name."""
        made = self.decisions
        result = {}
        for name, node in made.graph.nodes.items():
            if node.matmul:
                parts: dict[str, int] = {}
                for axis, count in made.cuts(name):
                    parts[node.axes[axis].name] = parts.get(node.axes[axis].name, 1) * count
                result[name] = parts
        return result

    def dp_mp(self) -> tuple[int, int]:
        """Return (data parallel, model parallel) of most matrix products: parts of rows, and of columns or inner."""
        votes: dict[tuple[int, int], int] = {}
        for parts in self.degrees().values():
            # Experts are divided among data-parallel devices.
            dp = math.prod(n for axis, n in parts.items() if axis.startswith(("rows", "experts")))
            mp = math.prod(parts.values()) // dp
            votes[dp, mp] = votes.get((dp, mp), 0) + 1
        return max(votes, key=lambda pair: votes[pair]) if votes else (1, 1)

    def as_json(self) -> dict[str, object]:
        """Return cuts, bytes and placements (tensor dim, -1 whole, -2 pending sum) of every operator as plain data."""
        made, moved = self.decisions, self.edge_bytes()
        operators: dict[str, object] = {}
        for name, node in made.graph.nodes.items():
            operators[name] = {
                "kind": node.kind,
                "cut_axes": [None if c == NO_CUT else node.axes[c].name for c in made.choices[name]],
                "inputs": [
                    {
                        "from": source,
                        "placements": list(made.operand_placements(name, slot)),
                        "forward_bytes": moved[source, name, slot][0],
                        "backward_bytes": moved[source, name, slot][1],
                    }
                    for slot, source in enumerate(node.inputs)
                ],
                "output": list(made.output_placements(name)),
            }
        dp, mp = self.dp_mp()
        return {
            "schema_version": SCHEMA_VERSION,
            "search_mode": self.search_mode,
            "mesh": list(made.mesh),
            "data_parallel": dp,
            "model_parallel": mp,
            "search_s": self.search_s,
            "bound": self.bound.as_json() if self.bound else None,
            "pipeline_stages": self.stages,
            "forward_bytes": sum(f for f, _ in moved.values()),
            "backward_bytes": sum(b for _, b in moved.values()),
            "unknown_operators": made.graph.unknown,
            "notes": list(self.notes),
            "operators": operators,
        }
