"""The points at which Megatron posts its point-to-point messages and waits for them.

A rank's step becomes a list of computations and message calls. A message begins when both sides have posted it; a rank
continues when the messages it waits for are complete (rendezvous). Checked to the nanosecond against Megatron's own
schedules on the emulated device: docs/validation/emulated.md.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule.programs import Action, Program
from mindspeed_autoparallel.spec.layout import SENDS


class Message(NamedTuple):
    """One side of a message over the boundary between virtual stages ``boundary`` and ``boundary + 1``."""

    kind: str
    boundary: int
    microbatch: int
    sends: bool

    @property
    def other_side(self) -> Message:
        return Message(self.kind, self.boundary, self.microbatch, not self.sends)


class Post(NamedTuple):
    """Start messages and continue."""

    messages: tuple[Message, ...]


class Wait(NamedTuple):
    """Wait until earlier messages are complete."""

    messages: tuple[Message, ...]


class SendReceive(NamedTuple):
    """Start messages and wait for all of them."""

    messages: tuple[Message, ...]


Step = Action | Post | Wait | SendReceive


Moment = TypeVar("Moment")


def both_posted(step: Post | Wait | SendReceive, here: Moment, posted: dict[Message, Moment]) -> bool:
    """Post a step's messages at ``here``; return whether its rank may continue: what it waits for has both sides."""
    if not isinstance(step, Wait):
        for message in step.messages:
            posted.setdefault(message, here)
    return isinstance(step, Post) or all(message.other_side in posted for message in step.messages)


def message_steps(program: Program, sends: str) -> list[list[Step]]:
    """Return every stage's steps. Raises ``ConfigError`` for sends that the program's schedule does not support."""
    num_chunks = 1 + max(action.chunk for action in program[0])
    if sends not in SENDS:
        raise ConfigError(f"unknown sends {sends!r}; known: {', '.join(SENDS)}.")
    if sends == "eager":
        return [list(actions) for actions in program]
    if num_chunks == 1:
        if sends != "blocking":
            raise ConfigError(f"{sends} sends require the interleaved schedule: use blocking or eager.")
        return [_non_interleaved(stage, program) for stage in range(len(program))]
    steps = [_Interleaved(stage, program, num_chunks, sends).steps() for stage in range(len(program))]
    return [[step for step in row if isinstance(step, Action) or step.messages] for row in steps]


def _non_interleaved(stage: int, program: Program) -> list[Step]:
    last = len(program) - 1
    actions = program[stage]
    steps: list[Step] = []

    def message(kind: str, microbatch: int, sends: bool) -> tuple[Message, ...]:
        peer = stage + 1 if (kind == "F") == sends else stage - 1
        return (Message(kind, min(stage, peer), microbatch, sends),) if 0 <= peer <= last else ()

    steps.append(SendReceive(message("F", actions[0].microbatch, False)))
    for index, action in enumerate(actions):
        steps.append(action)
        following = actions[index + 1] if index + 1 < len(actions) else None
        send = message(action.kind, action.microbatch, True)
        receive = message(following.kind, following.microbatch, False) if following else ()
        # Megatron pairs a send with the opposite-direction receive; consecutive forwards are sent one by one.
        if following is not None and following.kind != action.kind:
            steps.append(SendReceive(send + receive))
        else:
            steps += [SendReceive(send), SendReceive(receive)]
    return [step for step in steps if isinstance(step, Action) or step.messages]


class _Interleaved:
    """The steps of one stage of the interleaved schedule.

    The stage that a direction starts from (first forward, last backward) receives from the other end of the pipeline,
    which runs ``num_stages - 1`` steps later. Every other stage receives for its own next step.
    """

    def __init__(self, stage: int, program: Program, num_chunks: int, sends: str) -> None:
        self.stage, self.num_stages, self.sends = stage, len(program), sends
        self.last_virtual = self.num_stages * num_chunks - 1
        actions = program[stage]
        self.forwards = [action for action in actions if action.kind == "F"]
        self.backwards = [action for action in actions if action.kind == "B"]
        self.total = len(self.forwards)
        # As in make_program; the order alone does not distinguish the last warm-up forward from the first steady one.
        # Pairs there
        # are on the last stage at least.
        self.paired = any(action.paired for action in program[-1])
        group = next((k for k, action in enumerate(self.forwards) if action.chunk), self.total)
        self.warmup = min(self.total, 2 * (self.num_stages - 1 - stage) + (num_chunks - 1) * group + self.paired)
        self.flushes, self.frees = sends.startswith("flushed"), sends.endswith("freed")
        self.blocks = sends == "blocking"
        self.waiting: dict[str, list[Message]] = {"F": [], "B": []}
        """Receives posted and not yet waited for, oldest first."""
        self.unsent: dict[str, tuple[Message, ...]] = {"F": (), "B": ()}
        """The latest send that was posted and not waited for."""

    def steps(self) -> list[Step]:
        steady = self.total - self.warmup
        steps: list[Step] = [SendReceive(self.needed(self.forwards[0]))]
        for k in range(self.warmup):
            steps += self._warmup_step(k, is_last=k == self.warmup - 1 and steady > 0)
        for k in range(steady):
            steps += self._steady_step(k, is_last=k == steady - 1)
        if not steady:
            steps.append(SendReceive(self.needed(self.backwards[0])))
        for k in range(steady, self.total):
            steps += self._cooldown_step(k)
        return [*steps, Wait(self.unsent["B"])]

    def _warmup_step(self, k: int, *, is_last: bool) -> list[Step]:
        receive = self.receive("F", k) if k < self.total - 1 else ()
        first_gradient = self.needed(self.backwards[0]) if is_last else ()
        if self.flushes:
            steps = self._overlapped_step("F", k, receive)
        else:
            together = first_gradient if self.blocks else ()
            steps = [self.forwards[k], SendReceive(self.sent(self.forwards[k]) + receive + together)]
        if not self.blocks:
            self.waiting["B"] += first_gradient
            steps.append(Post(first_gradient))
        return steps

    def _steady_step(self, k: int, *, is_last: bool) -> list[Step]:
        forward, backward = self.forwards[self.warmup + k], self.backwards[k]
        receive_forward = () if is_last else self.receive("F", self.warmup + k)
        receive_backward = self.receive("B", k) if k < self.total - 1 else ()
        if self.blocks:
            sent = self.sent(forward) + self.sent(backward)
            return [forward, backward, SendReceive(sent + receive_forward + receive_backward)]
        if self.paired:
            # Layers of both alternate: neither begins before both messages have arrived, nor sends before both end.
            return [
                self._wait_input(forward),
                self._wait_input(backward),
                forward,
                backward,
                *self._hand_over("F", self.sent(forward), receive_forward),
                *self._hand_over("B", self.sent(backward), receive_backward),
            ]
        return [
            self._wait_input(forward),
            forward,
            *self._hand_over("F", self.sent(forward), receive_forward),
            self._wait_input(backward),
            backward,
            *self._hand_over("B", self.sent(backward), receive_backward),
        ]

    def _cooldown_step(self, k: int) -> list[Step]:
        receive = self.receive("B", k) if k < self.total - 1 else ()
        if self.flushes:
            return self._overlapped_step("B", k, receive)
        backward = self.backwards[k]
        return [self._wait_input(backward), backward, SendReceive(self.sent(backward) + receive)]

    def _overlapped_step(self, kind: str, k: int, receive: tuple[Message, ...]) -> list[Step]:
        """Return a step with warm-up flush: the next receive is posted before the computation, except where the
        direction starts."""
        action = (self.forwards if kind == "F" else self.backwards)[k]
        steps: list[Step] = [self._wait_input(action)]
        if not self._starts(kind):
            self.waiting[kind] += receive
            steps.append(Post(receive))
            receive = ()
        return [*steps, action, *self._hand_over(kind, self.sent(action), receive)]

    def _hand_over(self, kind: str, send: tuple[Message, ...], receive: tuple[Message, ...]) -> list[Step]:
        steps: list[Step] = [Post(send + receive), Wait(self.unsent[kind])]
        self.waiting[kind] += receive
        self.unsent[kind] = send
        if kind == "F" and self.frees:
            steps.append(Wait(send))
            self.unsent[kind] = ()
        return steps

    def _wait_input(self, action: Action) -> Step:
        if not self.needed(action) or not self.waiting[action.kind]:
            return Wait(())
        return Wait((self.waiting[action.kind].pop(0),))

    def _starts(self, kind: str) -> bool:
        return self.stage == (0 if kind == "F" else self.num_stages - 1)

    def receive(self, kind: str, k: int) -> tuple[Message, ...]:
        """Return the messages received after step ``k`` of a direction."""
        order = self.forwards if kind == "F" else self.backwards
        if not self._starts(kind):
            return self.needed(order[k + 1])
        behind = k - (self.num_stages - 1)
        if behind < 0:
            return ()
        # Every stage has the same order, so the own list gives the other end's action.
        virtual = order[behind].chunk * self.num_stages + (self.num_stages - 1 if kind == "F" else 0)
        return tuple(message.other_side for message in self._sent_by(virtual, order[behind]))

    def needed(self, action: Action) -> tuple[Message, ...]:
        virtual = action.chunk * self.num_stages + self.stage
        boundary = virtual - 1 if action.kind == "F" else virtual
        inside = 0 <= boundary < self.last_virtual
        return (Message(action.kind, boundary, action.microbatch, False),) if inside else ()

    def sent(self, action: Action) -> tuple[Message, ...]:
        return self._sent_by(action.chunk * self.num_stages + self.stage, action)

    def _sent_by(self, virtual: int, action: Action) -> tuple[Message, ...]:
        boundary = virtual if action.kind == "F" else virtual - 1
        inside = 0 <= boundary < self.last_virtual
        return (Message(action.kind, boundary, action.microbatch, True),) if inside else ()
