"""The content of a plan's picture as plain data: equal operators of repeated layers are folded into one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from mindspeed_autoparallel.operators.constraints import ConstraintCost
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Node
from mindspeed_autoparallel.operators.graph.redistribution import gradient_of_output
from mindspeed_autoparallel.operators.moves import Move, list_moves, placement_text
from mindspeed_autoparallel.operators.plan import OperatorPlan

_SILENT = frozenset({"reshape", "transpose", "slice", "constant"})
"""Kinds that compute nothing: omitted if nothing is sent for them."""


def picture_data(
    plan: OperatorPlan,
    megatron: dict[str, object] | None = None,
    reason: str = "",
    constraints: Sequence[ConstraintCost] = (),
) -> dict[str, object]:
    """Return the plan as the plain data of its page.

    ``groups`` are equal operators in graph order, with count, cuts, shape, and the bytes that one device sends for one
    of them; ``tree`` has every operator, ``moves`` every redistribution. ``megatron``: the derived configuration as
    JSON; ``reason``: why it is None.
    """
    made, moved = plan.decisions, plan.edge_bytes()
    groups: list[dict[str, object]] = []
    counts: Counter[object] = Counter()
    for name, node in made.graph.nodes.items():
        sent = [moved[source, name, slot] for slot, source in enumerate(node.inputs)]
        if not node.inputs or (node.kind in _SILENT and not any(map(any, sent))):
            continue
        key = (node.role or name, made.choices[name], tuple(sent))
        if key not in counts:
            groups.append(_group(name, node, plan, sent))
        counts[key] += 1
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
        "groups": [{**group, "count": count} for group, count in zip(groups, counts.values(), strict=True)],
        "tree": tree_data(plan),
        "moves": [_told_move(move) for move in list_moves(plan)],
        "constraints": [constraint.as_json() for constraint in constraints],
        "notes": list(plan.notes),
        "megatron": megatron,
        "megatron_reason": reason,
    }


def tree_data(plan: OperatorPlan) -> dict[str, object]:
    """Return every operator by index, in a form compact enough for 10,000 of them: repeated strings are stored once.

    ``cuts`` index ``cutsets`` (an index into ``axes`` per mesh dim, -1 for none); ``edges`` are runs of four: producer,
    reader, bytes forward, bytes backward. Bytes sent for parameters and inputs are counted at their readers.
    """
    made, moved = plan.decisions, plan.edge_bytes()
    nodes = {name: node for name, node in made.graph.nodes.items() if node.inputs}
    number = {name: index for index, name in enumerate(nodes)}
    axes: dict[str, int] = {}
    cutsets: dict[tuple[int, ...], int] = {}
    kinds: dict[str, int] = {}
    shapes: dict[str, int] = {}
    cuts = []
    edges: dict[tuple[int, int], list[int]] = {}
    forward, backward = [0] * len(nodes), [0] * len(nodes)
    for name, node in nodes.items():
        names = [None if c == NO_CUT else node.axes[c].name for c in made.choices[name]]
        cut = tuple(-1 if axis is None else axes.setdefault(axis, len(axes)) for axis in names)
        cuts.append(cutsets.setdefault(cut, len(cutsets)))
        for slot, source in enumerate(node.inputs):
            sent = moved[source, name, slot]
            forward[number[name]] += sent[0]
            backward[number[name]] += sent[1]
            if source in number:
                held = edges.setdefault((number[source], number[name]), [0, 0])
                held[0], held[1] = held[0] + sent[0], held[1] + sent[1]
    shown = [" x ".join(map(str, node.output_shape)) for node in nodes.values()]
    return {
        "names": list(nodes),
        "kind": [kinds.setdefault(node.kind, len(kinds)) for node in nodes.values()],
        "shape": [shapes.setdefault(shape, len(shapes)) for shape in shown],
        "cuts": cuts,
        "forward": forward,
        "backward": backward,
        "edges": [value for (source, reader), sent in edges.items() for value in (source, reader, *sent)],
        "axes": list(axes),
        "cutsets": [list(cut) for cut in cutsets],
        "kinds": list(kinds),
        "shapes": list(shapes),
    }


def _told_move(move: Move) -> dict[str, object]:
    home = placement_text(gradient_of_output(move.source))
    return {
        **move.as_json(),
        "from": placement_text(move.source),
        "to": placement_text(move.target),
        "gradient": "" if move.gradient is None else f"{placement_text(move.gradient)} -> {home}",
        "total_us": move.total_us,
    }


def _group(name: str, node: Node, plan: OperatorPlan, sent: list[tuple[int, int]]) -> dict[str, object]:
    choices = plan.decisions.choices[name]
    return {
        "name": name,
        "kind": node.kind,
        "cuts": ["" if c == NO_CUT else node.axes[c].name for c in choices],
        "shape": list(node.output_shape),
        "local_share": 1 / math.prod(n for n, c in zip(plan.decisions.mesh, choices, strict=True) if c != NO_CUT),
        "forward_bytes": sum(forward for forward, _ in sent),
        "backward_bytes": sum(backward for _, backward in sent),
    }
