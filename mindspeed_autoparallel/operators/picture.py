"""What a picture of a plan shows, as plain data: equal operators of repeated layers folded into one."""

from __future__ import annotations

import math
from typing import Any

from mindspeed_autoparallel.operators.graph.node import NO_CUT, Node
from mindspeed_autoparallel.operators.plan import OperatorPlan

_SILENT = frozenset({"reshape", "transpose", "slice", "constant"})
"""Kinds that only rename elements: left out where nothing is sent for them."""


def picture_data(plan: OperatorPlan, megatron: dict[str, Any] | None = None, reason: str = "") -> dict[str, Any]:
    """Return ``groups`` in the order of the graph: name, count, cuts, sizes, inputs (index of a group and bytes sent).

    Bytes are what one device sends for one such operator; ``megatron`` is the derived configuration as JSON, or
    ``reason`` says why there is none.
    """
    made, moved = plan.decisions, plan.edge_bytes()
    groups: list[dict[str, Any]] = []
    index_of: dict[object, int] = {}
    group_of: dict[str, tuple[int, ...]] = {}
    for name, node in made.graph.nodes.items():
        if not node.inputs:
            group_of[name] = ()
            continue
        sent = [moved[name_in, name, slot] for slot, name_in in enumerate(node.inputs)]
        if node.kind in _SILENT and not any(map(any, sent)):
            # Its readers stand on what it reads.
            group_of[name] = tuple(dict.fromkeys(g for source in node.inputs for g in group_of[source]))
            continue
        key = (node.role or name, made.choices[name], tuple(sent))
        if key not in index_of:
            index_of[key] = len(groups)
            inputs: dict[int, list[int]] = {}
            for source, (forward, backward) in zip(node.inputs, sent, strict=True):
                for group in group_of[source]:
                    held = inputs.setdefault(group, [0, 0])
                    held[0], held[1] = held[0] + forward, held[1] + backward
            groups.append(_group(name, node, plan, sent, inputs))
        groups[index_of[key]]["count"] += 1
        group_of[name] = (index_of[key],)
    dp, mp = plan.dp_mp()
    return {
        "search_mode": plan.search_mode,
        "mesh": list(made.mesh),
        "data_parallel": dp,
        "model_parallel": mp,
        "stages": plan.stages,
        "search_s": plan.search_s,
        "num_operators": sum(bool(node.inputs) for node in made.graph.nodes.values()),
        "forward_bytes": sum(forward for forward, _ in moved.values()),
        "backward_bytes": sum(backward for _, backward in moved.values()),
        "groups": groups,
        "notes": list(plan.notes),
        "megatron": megatron,
        "megatron_reason": reason,
    }


def _group(
    name: str, node: Node, plan: OperatorPlan, sent: list[tuple[int, int]], inputs: dict[int, list[int]]
) -> dict[str, Any]:
    choices = plan.decisions.choices[name]
    parts: dict[str, int] = {}
    for axis, count in plan.decisions.cuts(name):
        parts[node.axes[axis].name] = parts.get(node.axes[axis].name, 1) * count
    return {
        "name": name,
        "kind": node.kind,
        "count": 0,
        "cuts": ["" if c == NO_CUT else node.axes[c].name for c in choices],
        "parts": parts,
        "shape": list(node.output_shape),
        "local_share": 1 / math.prod(n for n, c in zip(plan.decisions.mesh, choices, strict=True) if c != NO_CUT),
        "forward_bytes": sum(forward for forward, _ in sent),
        "backward_bytes": sum(backward for _, backward in sent),
        "inputs": [{"group": group, "forward_bytes": f, "backward_bytes": b} for group, (f, b) in inputs.items()],
    }
