"""Messages that a rank's schedule still refers to, beside microbatches in flight and the running pass (M6).

Lists, receive buffers, variables and message handles in Megatron's ``schedules.py`` hold them, and model chunks hold
their last input. ``tests/contract/test_messages_alive.py`` compares the bytes with the schedules' own, pass by pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol


class Action(Protocol):
    """A forward (``F``) or backward (``B``) of a microbatch on a chunk: what ``schedule`` programs are made of."""

    @property
    def kind(self) -> str: ...

    @property
    def chunk(self) -> int: ...

    @property
    def microbatch(self) -> int: ...

    @property
    def paired(self) -> bool: ...


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
) -> Sequence[int]:
    """Return the bytes of such messages by action. ``traffic``: by chunk; ``sends``: one of ``schedule.SENDS``."""
    if len(traffic) == 1:
        return _one_forward_one_backward(actions, traffic[0])
    return _interleaved(tuple(actions), tuple(traffic), rank, num_ranks, sends)


def _one_forward_one_backward(actions: Sequence[Action], passing: Traffic) -> list[int]:
    left, before = list[int](), ""
    has_passed_back = False
    for action in actions:
        if action.kind == "B":
            left.append(passing.received_bytes if has_passed_back else 0)
            has_passed_back = True
        else:
            # The previous backward's loss or output keeps its graph's leaf, the received tensor, with the gradient that
            # was sent back. The gradient that the backward received is alive, too.
            left.append(2 * passing.received_bytes + passing.sent_bytes if before == "B" else 0)
        before = action.kind
    return left


@lru_cache(maxsize=256)
def _interleaved(
    actions: tuple[Action, ...], traffic: tuple[Traffic, ...], rank: int, num_ranks: int, sends: str
) -> tuple[int, ...]:
    overlapped, flushed = sends != "blocking", sends.startswith("flushed")
    total = len(actions) // 2
    num_warmup = 2 * (num_ranks - 1 - rank) + (len(traffic) - 1) * num_ranks
    num_warmup = min(total, num_warmup + any(action.paired for action in actions))
    cooldown = 2 * total - num_warmup
    forwards = [action for action in actions if action.kind == "F"]
    received = _Received(traffic, _variable(forwards, traffic, num_warmup, overlapped=overlapped, flushed=flushed))
    left: list[int] = []
    for index, action in enumerate(actions):
        if action.kind == "F":
            received.forward(action)
        size = received.left_over()
        follower = actions[index + 1] if index + 1 < len(actions) else None
        if num_warmup <= index < cooldown:
            size += _steady(action, actions[index - 1], follower, traffic, overlapped=overlapped)
        elif flushed and follower is not None and follower.kind == action.kind:
            # Receives are posted ahead; the rank that starts the direction has none.
            if action.kind == "F" and rank > 0:
                size += traffic[follower.chunk].received_bytes
            elif action.kind == "B" and rank < num_ranks - 1:
                size += traffic[follower.chunk].sent_bytes
        elif overlapped and not flushed and num_warmup < total and index > cooldown:
            # Handles of the last messages that overlapped: the gradient sent last, the one received for the cool-down.
            size += received.gradient_left_of(actions[cooldown - 1], actions[index - 1])
            size += traffic[actions[cooldown].chunk].sent_bytes
        left.append(size)
        if action.kind == "B":
            received.backward(action)
    return tuple(left)


def _variable(
    forwards: Sequence[Action], traffic: Sequence[Traffic], num_warmup: int, *, overlapped: bool, flushed: bool
) -> tuple[int, int] | None:
    """Return the pass whose received tensor a variable holds to the end of the step; later tensors go
    through others."""
    if flushed:
        waited_for = [action for action in forwards[1:num_warmup] if traffic[action.chunk].received_bytes]
        return _place(waited_for[-1]) if waited_for else None
    return _place(forwards[num_warmup]) if overlapped and num_warmup < len(forwards) else None


class _Received:
    """Received tensors that a rank still holds after their backward, each with its gradient.

    A model chunk holds its last input into the next step.
    """

    def __init__(self, traffic: Sequence[Traffic], variable: tuple[int, int] | None) -> None:
        self._sizes = [passing.received_bytes for passing in traffic]
        self._variable = variable
        self._newest: dict[int, tuple[int, int] | None] = dict.fromkeys(range(len(traffic)))
        self._done: set[int] = set(self._newest)
        """Chunks whose newest microbatch has run its backward."""
        self._standing = 2 * sum(self._sizes)
        self._last: tuple[int, int] | None = None
        self._passed_back = 0
        """Bytes of the gradient that the previous backward sent, if ``_standing`` does not count it."""

    def left_over(self) -> int:
        """Return the bytes that are held now."""
        return self._standing + self._passed_back

    def forward(self, action: Action) -> None:
        """Record that a forward gives the chunk another tensor."""
        chunk, before = action.chunk, self._newest[action.chunk]
        if chunk in self._done and (before is None or before != self._variable):
            self._standing -= 2 * self._sizes[chunk]
            if before is not None and before == self._last:
                self._passed_back = self._sizes[chunk]
        self._newest[chunk] = _place(action)
        self._done.discard(chunk)

    def backward(self, action: Action) -> None:
        """Record that a microbatch's backward has run."""
        self._last = place = _place(action)
        if place == self._newest[action.chunk]:
            self._done.add(action.chunk)
        self._passed_back = 0 if self._stands(place) else self._sizes[action.chunk]
        if self._stands(place):
            self._standing += 2 * self._sizes[action.chunk]

    def gradient_left_of(self, sent: Action, before: Action) -> int:
        """Return the bytes that the handle of the gradient of ``sent`` adds; ``before``: the previous pass."""
        place = _place(sent)
        return 0 if self._stands(place) or place == _place(before) else self._sizes[sent.chunk]

    def _stands(self, place: tuple[int, int]) -> bool:
        return place in (self._newest[place[0]], self._variable)


def _steady(
    action: Action, before: Action, follower: Action | None, traffic: Sequence[Traffic], *, overlapped: bool
) -> int:
    """Return the bytes between warm-up and cool-down, where a turn is a forward and a backward."""
    assert follower is not None  # a backward ends the step
    if action.kind == "F":
        # The gradient for the turn's backward arrived in the previous turn.
        return traffic[follower.chunk].sent_bytes
    # The output of the turn's forward is freed at the end of the turn.
    size = traffic[before.chunk].sent_bytes
    if overlapped and follower.kind == "F":
        size += traffic[follower.chunk].received_bytes
    return size


def _place(action: Action) -> tuple[int, int]:
    return action.chunk, action.microbatch
