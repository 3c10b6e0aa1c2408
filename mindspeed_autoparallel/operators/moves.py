"""Every redistribution of a plan with its placements, collectives, bytes and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE
from mindspeed_autoparallel.operators.graph.redistribution import Placements, gradient_of_output, steps
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.units import format_bytes, format_us


@dataclass(frozen=True)
class Move:
    """One tensor that moves from one placement to another for ``readers``, and its gradient back.

    ``tensor`` names the operator, parameter or input that produces it; ``shape`` is that of the whole tensor;
    placements are one per mesh dim. Bytes are what one device sends; times are in microseconds. ``count`` equal moves
    of repeated layers are one ``Move``, with the bytes and times of a single one.
    """

    tensor: str
    readers: tuple[str, ...]
    shape: tuple[int, ...]
    source: Placements
    target: Placements
    gradient: Placements | None
    """Placement in which the readers leave the gradient; None without a gradient."""
    forward_steps: tuple[str, ...]
    backward_steps: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    forward_us: float
    backward_us: float
    count: int = 1

    @property
    def total_us(self) -> float:
        """Return the time of all ``count`` moves, both directions."""
        return self.count * (self.forward_us + self.backward_us)

    def as_json(self) -> dict[str, object]:
        """Return it as plain data; a placement is a tensor dim, -1 for whole, or -2 for a pending sum."""
        return {
            "tensor": self.tensor,
            "readers": list(self.readers),
            "count": self.count,
            "shape": list(self.shape),
            "from": list(self.source),
            "to": list(self.target),
            "gradient_from": None if self.gradient is None else list(self.gradient),
            "forward_collectives": list(self.forward_steps),
            "backward_collectives": list(self.backward_steps),
            "forward_bytes": self.forward_bytes,
            "backward_bytes": self.backward_bytes,
            "forward_us": self.forward_us,
            "backward_us": self.backward_us,
        }


def placement_text(placements: Sequence[int]) -> str:
    """Return placements in PyTorch's notation: ``S(1) R P`` is cut by dim 1, whole, and a pending sum."""
    names = {REPLICATE: "R", PARTIAL: "P"}
    return " ".join(names.get(p, f"S({p})") for p in placements) or "R"


def list_moves(plan: OperatorPlan) -> list[Move]:
    """List the redistributions of ``plan`` that send anything, most expensive first; equal ones of repeated layers are
    merged.

    Their bytes, times ``count``, add up to those of ``plan.edge_bytes``.
    """
    alike: dict[object, Move] = {}
    nodes = plan.decisions.graph.nodes
    for move in _each(plan):
        roles = tuple(nodes[name].role or name for name in (move.tensor, *move.readers))
        key = (roles, move.shape, move.source, move.target, move.gradient, move.forward_bytes, move.backward_bytes)
        held = alike.get(key)
        alike[key] = replace(held, count=held.count + 1) if held else move
    return sorted(alike.values(), key=lambda move: -move.total_us)


def _each(plan: OperatorPlan) -> Iterator[Move]:
    made, sent = plan.decisions, plan.edge_bytes()
    mesh, rate = made.mesh, Machine().link_bytes_per_us
    for name, readers in made.graph.consumers().items():
        shared: dict[tuple[Placements, Placements | None], list[tuple[str, int]]] = {}
        for reader, slot in readers:
            shared.setdefault(made.wanted(name, reader, slot), []).append((reader, slot))
        source, shape = made.output_placements(name), made.graph.nodes[name].output_shape
        for (target, gradient), group in shared.items():
            forward = sum(sent[name, reader, slot][0] for reader, slot in group)
            backward = sum(sent[name, reader, slot][1] for reader, slot in group)
            if not forward and not backward:
                continue
            there = steps(source, target, shape, mesh)
            back = [] if gradient is None else steps(gradient, gradient_of_output(source), shape, mesh)
            yield Move(
                name,
                tuple(dict.fromkeys(reader for reader, _ in group)),
                shape,
                source,
                target,
                gradient,
                tuple(step.collective for step in there),
                tuple(step.collective for step in back),
                forward,
                backward,
                forward / rate,
                backward / rate,
            )


def move_lines(moves: Sequence[Move], most: int = 40) -> list[str]:
    """Return lines for the ``most`` most expensive moves, and the total of the others."""
    lines = [f"{'sent per device':>18} {'time':>9}  tensor: from -> to (collectives), for its readers"]
    for move in moves[:most]:
        each = f" x{move.count}" if move.count > 1 else ""
        way = f"{placement_text(move.source)} -> {placement_text(move.target)} ({_named(move.forward_steps)})"
        if move.gradient is not None and move.backward_steps:
            home = placement_text(gradient_of_output(move.source))
            way += f", gradient {placement_text(move.gradient)} -> {home} ({_named(move.backward_steps)})"
        total = move.count * (move.forward_bytes + move.backward_bytes)
        more = f" and {len(move.readers) - 1} more" if len(move.readers) > 1 else ""
        lines.append(
            f"{format_bytes(total):>18} {format_us(move.total_us):>9}  {move.tensor}{each}: {way}, "
            f"for {move.readers[0]}{more}"
        )
    rest = moves[most:]
    if rest:
        left = sum(move.count * (move.forward_bytes + move.backward_bytes) for move in rest)
        lines.append(f"{format_bytes(left):>18} {format_us(sum(m.total_us for m in rest)):>9}  {len(rest)} others")
    return lines


def _named(collectives: Sequence[str]) -> str:
    return ", ".join(collectives) or "nothing"
