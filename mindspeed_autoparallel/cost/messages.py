"""What a rank's schedule refers to of messages beside microbatches in flight and the pass at work (M6).

Megatron's lists, receive buffers and local variables decide it (``schedules.py``); its gradients are as large as the
messages. Held against the schedules themselves, pass by pass: ``tests/contract/test_messages_alive.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Action(Protocol):
    """A forward (``F``) or backward (``B``) of a microbatch on a chunk: what ``schedule`` programs are made of."""

    @property
    def kind(self) -> str: ...

    @property
    def chunk(self) -> int: ...

    @property
    def microbatch(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What passes through a chunk per microbatch; gradients of messages are as large as the messages."""

    received_bytes: int = 0
    """From the stage before."""
    sent_bytes: int = 0
    """To the next stage."""
    batch_bytes: int = 0
    """Data alive during the forward only."""


def left_over(
    actions: Sequence[Action], traffic: Sequence[Traffic], rank: int, num_ranks: int, sends: str
) -> list[int]:
    """Bytes by action. ``traffic``: by chunk; ``sends``: one of ``schedule.SENDS``."""
    if len(traffic) == 1:
        return _one_forward_one_backward(actions, traffic[0])
    return _interleaved(actions, traffic, rank, num_ranks, sends)


def _one_forward_one_backward(actions: Sequence[Action], passing: Traffic) -> list[int]:
    left, before = [], ""
    has_passed_back = False
    for action in actions:
        if action.kind == "B":
            left.append(passing.received_bytes if has_passed_back else 0)
            has_passed_back = True
        else:
            # The loss or output of the backward before keeps its graph's leaf, the received tensor, whose gradient was
            # sent back; the gradient it began with is there, too.
            left.append(2 * passing.received_bytes + passing.sent_bytes if before == "B" else 0)
        before = action.kind
    return left


def _interleaved(
    actions: Sequence[Action], traffic: Sequence[Traffic], rank: int, num_ranks: int, sends: str
) -> list[int]:
    overlapped, flushed = sends != "blocking", sends.startswith("flushed")
    forwards = [action for action in actions if action.kind == "F"]
    num_warmup = min(len(forwards), 2 * (num_ranks - 1 - rank) + (len(traffic) - 1) * num_ranks)
    # Variables that are not given another value later. The last output, whose graph has its received tensor as a leaf;
    # and what the last blocking exchange of the warm-up received, where later ones go through buffers.
    kept = {_place(forwards[-1])} if traffic[forwards[-1].chunk].sent_bytes else set()
    if overlapped and not flushed and num_warmup < len(forwards):
        kept.add(_place(forwards[num_warmup]))
    left = []
    standing = passed_back = 0
    for index, action in enumerate(actions):
        size = standing + passed_back
        follower = actions[index + 1] if index + 1 < len(actions) else None
        if num_warmup <= index < 2 * len(forwards) - num_warmup:
            size += _steady(action, actions[index - 1], follower, traffic, overlapped=overlapped)
        elif flushed and follower is not None and follower.kind == action.kind:
            # Posted ahead, but by the ranks that lead.
            if action.kind == "F" and rank > 0:
                size += traffic[follower.chunk].received_bytes
            elif action.kind == "B" and rank < num_ranks - 1:
                size += traffic[follower.chunk].sent_bytes
        left.append(size)
        if action.kind == "B":
            passed_back = traffic[action.chunk].received_bytes
            if _place(action) in kept:
                # The tensor, and the gradient that was just passed back.
                standing, passed_back = standing + 2 * passed_back, 0
    return left


def _steady(
    action: Action, before: Action, follower: Action | None, traffic: Sequence[Traffic], *, overlapped: bool
) -> int:
    """Between warm-up and cool-down, where a forward and a backward make a turn."""
    assert follower is not None  # a backward ends the step
    if action.kind == "F":
        # The gradient of the turn's backward came in the turn before.
        return traffic[follower.chunk].sent_bytes
    # The output of the turn's forward is freed at the end of the turn.
    size = traffic[before.chunk].sent_bytes
    if overlapped and follower.kind == "F":
        size += traffic[follower.chunk].received_bytes
    return size


def _place(action: Action) -> tuple[int, int]:
    return action.chunk, action.microbatch
