"""What a pass of a chunk holds at every block, and what a forward and a backward hold beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mindspeed_autoparallel.cost.messages import Traffic
from mindspeed_autoparallel.cost.placed import PlacedBlock


@dataclass(frozen=True)
class HighPoint:
    """A block at work, in bytes."""

    name: str
    """``forward of text_decoder layer 13``."""
    is_layer: bool
    alive: int
    """Of this microbatch on this chunk."""
    transient: int
    message: int
    saved: int
    """Of ``alive``, what this block saved."""

    @property
    def height(self) -> int:
        """Return everything that this pass holds."""
        return self.alive + self.transient + self.message


def points_in_time(
    kind: str, blocks: Sequence[PlacedBlock], passing: Traffic, passing_state: Sequence[int]
) -> list[HighPoint]:
    """Return a point per block, in the order of the pass (``F`` or ``B``). ``passing_state``: by block, parameters and
    gradients that are whole only while it runs."""
    alive = passing.received_bytes + kept_side_bytes(blocks)
    keeps_side = {module: _keeps_side(blocks, module) for module in {block.module for block in blocks}}
    points: list[HighPoint] = []
    for index, block in enumerate(blocks):
        recompute = block.recompute
        alive += recompute.saved_bytes
        transient = recompute.forward_peak_bytes if kind == "F" else recompute.backward_peak_bytes
        transient += passing_state[index]
        message = 0
        if kind == "F":
            transient += passing.batch_bytes
            if not keeps_side[block.module]:
                transient += block.side.total_bytes - block.side.kept_bytes
        elif index < len(blocks) - 1:
            message = passing.sent_bytes
        elif block.kind != "full":
            # Freed when it had been sent, unless recomputed; its gradient is part of the block's own transient.
            message = -passing.sent_bytes
        name = f"{'forward' if kind == 'F' else 'backward'} of {block.name}"
        points.append(HighPoint(name, block.is_layer, alive, transient, message, recompute.saved_bytes))
    return points if kind == "F" else points[::-1]


def highest_of_pair(forward: Sequence[HighPoint], backward: Sequence[HighPoint]) -> HighPoint:
    """Return the highest point of a forward beside a backward whose blocks take turns, as in Megatron's combined 1F1B.

    A turn is a layer of each, both at work, its end freeing what the backward's layer had saved. Before them the
    forward's embedding runs and the backward of the output layer, behind them the output layer and the embedding's
    backward.
    """
    f_before, f_layers, f_behind = _around_layers(forward)
    b_before, b_layers, b_behind = _around_layers(backward)
    turns: list[tuple[HighPoint | None, HighPoint | None]] = []
    turns += [(point, None) for point in f_before] + [(None, point) for point in b_before]
    turns += list(zip_longest(f_layers, b_layers))
    turns += [(point, None) for point in f_behind] + [(None, point) for point in b_behind]
    held = [forward[0].alive - forward[0].saved, backward[0].alive]
    best: HighPoint | None = None
    for turn in turns:
        alive = [point.alive if point is not None else left for point, left in zip(turn, held, strict=True)]
        at_work = [point for point in turn if point is not None]
        point = HighPoint(
            " beside ".join(point.name for point in at_work),
            True,
            sum(alive),
            sum(point.transient for point in at_work),
            sum(point.message for point in at_work),
            0,
        )
        if best is None or point.height > best.height:
            best = point
        held = alive
        if turn[1] is not None:
            held[1] -= turn[1].saved
    assert best is not None  # every chunk holds a block
    return best


def _around_layers(points: Sequence[HighPoint]) -> tuple[list[HighPoint], list[HighPoint], list[HighPoint]]:
    layers = [k for k, point in enumerate(points) if point.is_layer]
    first, end = (layers[0], layers[-1] + 1) if layers else (len(points), len(points))
    return list(points[:first]), list(points[first:end]), list(points[end:])


def kept_side_bytes(blocks: Sequence[PlacedBlock]) -> int:
    """Return side inputs of the modules on a stage that live until the backward (M7)."""
    sides = {block.module: block.side for block in blocks}
    return sum(side.total_bytes if _keeps_side(blocks, module) else side.kept_bytes for module, side in sides.items())


def _keeps_side(blocks: Sequence[PlacedBlock], module: str) -> bool:
    """Return whether a layer of ``module`` is recomputed whole, and so keeps all its side inputs."""
    return any(block.kind == "full" for block in blocks if block.module == module)
