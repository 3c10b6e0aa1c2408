"""Peak memory of one pipeline rank, by replaying what is alive at every block of its schedule.

Formulas M1-M7 in docs/cost-model.md. A recompute kind is chosen per layer; the recomputed layers are the first of their
module on the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from mindspeed_autoparallel.cost.messages import Action, left_over
from mindspeed_autoparallel.cost.messages import Traffic as Traffic
from mindspeed_autoparallel.cost.placed import PlacedBlock as PlacedBlock
from mindspeed_autoparallel.cost.placed import states_of
from mindspeed_autoparallel.cost.sharding import gathered_bytes, sharded_state, waiting_bytes
from mindspeed_autoparallel.profiles import BlockCost, DeviceCost, StateBytes
from mindspeed_autoparallel.spec import Layout


class HighPoint(NamedTuple):
    """What a pass holds while one block runs, in bytes."""

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
    keep_side = _keeping_side(blocks)
    points: list[HighPoint] = []
    for index, block in enumerate(blocks):
        recompute = block.recompute
        alive += recompute.saved_bytes
        transient = recompute.forward_peak_bytes if kind == "F" else recompute.backward_peak_bytes
        transient += passing_state[index]
        message = 0
        if kind == "F":
            transient += passing.batch_bytes
            if block.module not in keep_side:
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

    In a turn, a layer of each runs; its end frees what the backward's layer had saved. The forward's embedding and the
    output layer's backward run before the turns, the output layer and the embedding's backward after them.
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
    sides, keep_side = {block.module: block.side for block in blocks}, _keeping_side(blocks)
    return sum(side.total_bytes if module in keep_side else side.kept_bytes for module, side in sides.items())


def _keeping_side(blocks: Sequence[PlacedBlock]) -> set[str]:
    """Return the modules with a layer that is recomputed whole: they keep all their side inputs."""
    return {block.module for block in blocks if block.kind == "full"}


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The highest point and the terms that add up to it, in bytes."""

    peak_bytes: int
    point: str
    terms: dict[str, int]


def static_terms(blocks: Sequence[PlacedBlock], layout: Layout) -> dict[str, int]:
    """Return bytes alive during the whole step (M1): parameters, main gradients, optimizer state after its split."""
    if layout.sharding is not None:
        return sharded_state(blocks, layout)
    parameters = gradients = optimizer = 0
    for state, group in states_of(blocks, layout):
        parameters += state.parameter_bytes + state.copy_bytes
        gradients += state.gradient_bytes
        optimizer += state.optimizer_unshardable_bytes + _split(state.optimizer_bytes, group, layout)
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}


def state_bytes(block: BlockCost | None, layout: Layout) -> int:
    """Return the sum of ``static_terms`` of one block; 0 without a block."""
    return 0 if block is None else sum(static_terms([PlacedBlock(name="", cost=block)], layout).values())


def updated_parameter_bytes(blocks: Sequence[PlacedBlock], layout: Layout) -> int:
    """Return bytes of trained parameters that this rank's optimizer step updates; frozen blocks have no gradients."""
    return sum(
        _split(state.parameter_bytes, group, layout) for state, group in states_of(blocks, layout) if _trained(state)
    )


def rank_peak(
    chunks: Sequence[Sequence[PlacedBlock]],
    actions: Sequence[Action],
    layout: Layout,
    device: DeviceCost,
    traffic: Sequence[Traffic] = (),
    *,
    rank: int = 0,
    sends: str = "freed",
) -> PeakMemory:
    """Return the peak of a rank that holds ``chunks`` and runs ``actions`` (its row of the program), with the terms by
    name.

    M2 in a forward: static + saved of everything in flight + of the chunk up to this block + its transient.
    M3 in a backward: static + everything in flight minus the chunk's blocks already done + transient.
    M4 in the optimizer step: static + its transient. Runtime overhead is added to each.
    In a pair of combined 1F1B, M2 and M3 hold at once, layer beside layer.
    ``traffic``: by chunk; ``rank``: of the pipeline; ``sends``: how an interleaved schedule treats its messages, one of
    ``schedule.SENDS``. M6 and M7 define which messages, data and side inputs are alive when.
    """
    everything = [block for chunk in chunks for block in chunk]
    static = static_terms(everything, layout)
    base = sum(static.values())
    traffic = traffic or [Traffic()] * len(chunks)
    saved = [
        passing.received_bytes
        - passing.sent_bytes
        + kept_side_bytes(chunk)
        + sum(block.recompute.saved_bytes for block in chunk)
        for passing, chunk in zip(traffic, chunks, strict=True)
    ]
    step_transient = round(device.optimizer_peak_bytes_per_parameter_byte * updated_parameter_bytes(everything, layout))
    best = (base + step_transient, "optimizer step", {"optimizer_step": step_transient})
    points = {
        (kind, chunk): points_in_time(kind, blocks, traffic[chunk], _passing_state(kind, blocks, layout))
        for chunk, blocks in enumerate(chunks)
        if blocks
        for kind in "FB"
    }
    messages = left_over(actions, traffic, rank, layout.pipeline_size, sends)
    for others, high, left in _high_points(actions, points, saved, messages):
        peak = base + others + left + high.height
        if peak > best[0]:
            terms = {
                "other_microbatches": others,
                "this_microbatch": high.alive,
                "transient": high.transient,
                "messages": left + high.message,
            }
            best = (peak, high.name, terms)
    terms = {**static, **best[2], "runtime_overhead": device.runtime_overhead_bytes}
    return PeakMemory(peak_bytes=best[0] + device.runtime_overhead_bytes, point=best[1], terms=terms)


def _high_points(
    actions: Sequence[Action],
    points: Mapping[tuple[str, int], Sequence[HighPoint]],
    saved: Sequence[int],
    messages: Sequence[int],
) -> Iterator[tuple[int, HighPoint, int]]:
    """Yield, for every pass or pair, the bytes of other microbatches, its highest point, and bytes of old messages.

    ``points``: by direction and chunk; ``saved``: by chunk; ``messages``: by action.
    """
    highest = {key: max(found, key=lambda point: point.height) for key, found in points.items()}
    pairs: dict[tuple[int, int], HighPoint] = {}
    in_flight = ahead = left_ahead = 0
    for action, follower, left in zip(actions, [*actions[1:], None], messages, strict=True):
        if action.kind == "F":
            if follower is None or not follower.paired:
                yield in_flight, highest["F", action.chunk], left
            in_flight += saved[action.chunk]
            ahead, left_ahead = action.chunk, left
            continue
        in_flight -= saved[action.chunk]
        if not action.paired:
            yield in_flight, highest["B", action.chunk], left
            continue
        key = ahead, action.chunk
        if key not in pairs:
            pairs[key] = highest_of_pair(points["F", ahead], points["B", action.chunk])
        yield in_flight - saved[ahead], pairs[key], max(left_ahead, left)


def mindspeed_stage_bytes(blocks: Sequence[PlacedBlock], in_flight: int, layout: Layout) -> dict[str, int]:
    """Return MindSpeed's own stage memory (M5), for imported profiles; the terms add up to it.

    (activations - recomputed activations) x (in-flight - 1) + activations + static.
    """
    terms = static_terms(blocks, layout)
    terms["in_flight_activations"] = sum(block.recompute.saved_bytes for block in blocks) * (in_flight - 1)
    terms["activations"] = sum(block.cost.recompute["none"].saved_bytes for block in blocks)
    return terms


def _passing_state(kind: str, blocks: Sequence[PlacedBlock], layout: Layout) -> list[int]:
    """Return parameters and gradients that are whole only while each block runs."""
    if layout.sharding is None:
        return [0] * len(blocks)
    gathered = gathered_bytes(blocks, layout.sharding)[kind]
    if kind == "F":
        return gathered
    return [sum(pair) for pair in zip(gathered, waiting_bytes(blocks, layout.sharding), strict=True)]


def _trained(state: StateBytes) -> bool:
    return state.gradient_bytes > 0


def _split(size_bytes: int, group: int, layout: Layout) -> int:
    return -(-size_bytes // group) if layout.distributed_optimizer else size_bytes
