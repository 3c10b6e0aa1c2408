"""Encoder batches in the encoder's pipeline, before and after the backbone's. Formula H7.

Batches are the microbatches of Megatron's 1F1B: forward only before the backbone, forward and backward after it, where
the forwards pass on kept activations or run again. Inputs, outputs and gradients are transferred concurrently, in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from mindspeed_autoparallel.schedule.event_graph import take_all
from mindspeed_autoparallel.schedule.messages import Message, SendReceive, Step, both_posted, message_steps
from mindspeed_autoparallel.schedule.programs import Action, make_program

REPLAYED_ROUNDS = 8
"""Batches per stage that are replayed; each further one adds the time of a batch of the last round, and all of them
take at least their transfers."""


@dataclass(frozen=True, kw_only=True)
class StagedRounds:
    """``count`` equal batches on every stage of an encoder's pipeline. Microseconds of each batch."""

    count: int
    forward_us: tuple[float, ...]
    """By stage."""
    backward_us: tuple[float, ...] = ()
    """By stage, without recomputed forwards."""
    again_us: tuple[float, ...] = ()
    """By stage: the recomputed forward in the backward pass, 0 if the graph was kept."""
    message_us: float = 0.0
    """Between neighbouring stages: the shape, then the rows."""
    inputs_us: float = 0.0
    outputs_us: float = 0.0
    gradients_us: float = 0.0

    def without_transfers(self) -> StagedRounds:
        """Return the same batches without transfers between encoder and backbone."""
        return replace(self, inputs_us=0.0, outputs_us=0.0, gradients_us=0.0)


def staged_forward_us(runs: Sequence[StagedRounds]) -> float:
    """Return the time from the first input sent to the last rows arrived."""
    return _long(tuple(runs), forward_only=True)


def staged_backward_us(runs: Sequence[StagedRounds]) -> float:
    """Return the time from the first gradient sent to the last backward done."""
    return _long(tuple(runs), forward_only=False)


def _long(runs: tuple[StagedRounds, ...], *, forward_only: bool) -> float:
    """Replay; of a long run only as many rounds as it takes for the increment to settle."""
    if not runs:
        return 0.0
    first, rest = runs[0], runs[1:]
    stages = len(first.forward_us)
    most = REPLAYED_ROUNDS * stages
    if first.count <= most:
        return _replayed(runs, forward_only)
    long, short = (_replayed((replace(first, count=n), *rest), forward_only) for n in (most, most - stages))
    # Transfers are sequential, the inputs first: many of them may take longer than stages that were slower so far.
    travelling_us = sum(
        run.count * (run.inputs_us + run.outputs_us if forward_only else run.gradients_us) for run in runs
    )
    return max(long + (first.count - most) * (long - short) / stages, travelling_us)


@lru_cache(maxsize=65536)
def _replayed(runs: tuple[StagedRounds, ...], forward_only: bool) -> float:
    batches = [run for run in runs for _ in range(run.count)]
    stages = len(batches[0].forward_us)
    # All transfers of a kind start together and run one after another.
    due = list(accumulate(run.inputs_us if forward_only else run.gradients_us for run in batches))
    waiting_stage = 0 if forward_only else stages - 1
    ends = [0.0]
    arrived = due[-1]
    for node in _nodes(stages, len(batches), forward_only)[1:]:
        begin = max(ends[other] + (batches[batch].message_us if batch >= 0 else 0.0) for other, batch in node.waits)
        if node.action is not None:
            run, batch = batches[node.action.microbatch], node.action.microbatch
            if forward_only:
                if node.stage == waiting_stage:
                    begin = max(begin, due[batch])
                begin += run.forward_us[node.stage]
                if node.stage == stages - 1:
                    arrived = max(arrived, begin) + run.outputs_us
            elif node.action.kind == "B":
                begin += run.backward_us[node.stage]
            else:
                begin += run.again_us[node.stage]
                if node.stage == waiting_stage:
                    begin = max(begin, due[batch])
        ends.append(begin)
    return max(arrived, *ends)


class _Node(NamedTuple):
    stage: int
    action: Action | None
    """None: messages."""
    waits: tuple[tuple[int, int], ...]
    """(node, batch whose message is between; -1: none)."""


@lru_cache(maxsize=256)
def _nodes(stages: int, count: int, forward_only: bool) -> tuple[_Node, ...]:
    """Return computations and waits of all stages in topological order."""
    if forward_only:
        program = tuple(tuple(Action("F", 0, batch) for batch in range(count)) for _ in range(stages))
    else:
        program = make_program("1f1b", stages, count)
    steps = message_steps(program, "blocking")
    nodes = [_Node(0, None, ())]
    last, posted = [0] * stages, dict[Message, int]()

    def take(stage: int, step: Step) -> bool:
        if isinstance(step, Action):
            nodes.append(_Node(stage, step, ((last[stage], -1),)))
        else:
            assert isinstance(step, SendReceive)
            if not both_posted(step, last[stage], posted):
                return False
            sides = [
                (posted[side], message.microbatch)
                for message in step.messages
                for side in (message, message.other_side)
            ]
            nodes.append(_Node(stage, None, tuple(sides)))
        last[stage] = len(nodes) - 1
        return True

    take_all(steps, take)
    return tuple(nodes)


REPEATING = 4
"""Number of equal rounds after which each further one adds the longer of computation and transfer."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """``count`` equal batches: computation, and transfer, of each."""

    count: int
    compute_us: float
    transfer_us: float
    inputs_us: float = 0.0
    """Transfer of a forward's inputs, after the rows of the previous batch; 0: no transfer."""
    before_us: float = 0.0
    """Recomputed forward of a backward, before the wait for its gradients."""


def forward_us(runs: Sequence[Rounds]) -> float:
    """Return the time to receive batch k, compute it, send it, and wait for batch k - 1; transfers are sequential."""
    now = before = arrived = 0.0
    for run in runs:
        for _ in range(min(run.count, REPEATING)):
            now = max(now, before)
            if run.inputs_us:
                now = max(now, arrived) + run.inputs_us
            now += run.compute_us
            before, arrived = arrived, max(now, arrived) + run.transfer_us
        one_by_one = run.inputs_us + run.compute_us + run.transfer_us
        each = one_by_one if run.inputs_us else max(run.compute_us, run.transfer_us)
        more = max(0, run.count - REPEATING) * each
        now, before, arrived = now + more, before + more, arrived + more
    return max(now, arrived)


def backward_us(runs: Sequence[Rounds]) -> float:
    """Return the time to send the gradients of batch k, then compute batch k - 1 with its received gradients."""
    now = arrived = 0.0
    waiting: tuple[float, Rounds] | None = None
    for run in runs:
        for _ in range(min(run.count, REPEATING)):
            arrived = max(now, arrived) + run.transfer_us
            if waiting is not None:
                now = _through(now, *waiting)
            waiting = (arrived, run)
        more = max(0, run.count - REPEATING) * max(run.before_us + run.compute_us, run.transfer_us)
        now, arrived = now + more, arrived + more
        if waiting is not None:
            waiting = (waiting[0] + more, waiting[1])
    return now if waiting is None else _through(now, *waiting)


def _through(now: float, arrived: float, run: Rounds) -> float:
    return max(now + run.before_us, arrived) + run.compute_us
