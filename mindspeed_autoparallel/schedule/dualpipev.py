"""DualPipeV, as MindSpeed runs it (``--schedules-method dualpipev`` without ``--moe-fb-overlap``).

Every rank holds two chunks, and the chain of ``2 P`` stages goes down the ranks and up again: chunk 0 of rank r is
stage r, chunk 1 is stage 2 P - 1 - r, so that embedding and output layer are on rank 0. Forwards enter as chunk 0 and
return as chunk 1, and both directions of both chunks alternate. Weight gradients are split off only with MindSpeed's
layers of ``--moe-fb-overlap``: here a backward is whole.
"""

from __future__ import annotations

from functools import lru_cache

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule.messages import Message, Post, SendReceive, Step, Wait
from mindspeed_autoparallel.schedule.programs import Action, Program

DUALPIPEV = "dualpipev"
"""In addition to ``schedule.SENDS``: the messages of this schedule, which fix its order."""
Messages = tuple[Message, ...]


def chain_stage(rank: int, chunk: int, num_stages: int) -> int:
    """Return the position of a rank's chunk in the chain."""
    return rank if chunk == 0 else 2 * num_stages - 1 - rank


def dualpipev_program(num_stages: int, num_microbatches: int) -> Program:
    """Return every rank's computations, in order. Raises ``ConfigError`` for sizes that MindSpeed refuses."""
    return tuple(
        tuple(step for step in steps if isinstance(step, Action))
        for steps in dualpipev_steps(num_stages, num_microbatches)
    )


@lru_cache(maxsize=32)
def dualpipev_steps(num_stages: int, num_microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """Return every rank's computations and messages. Raises ``ConfigError`` for sizes that MindSpeed refuses."""
    if num_stages < 2:
        raise ConfigError(f"DualPipeV needs 2 pipeline ranks or more, got {num_stages}.")
    if num_microbatches < 2 * num_stages - 1:
        raise ConfigError(
            f"DualPipeV needs at least {2 * num_stages - 1} microbatches (2 x pipeline size - 1), got "
            f"{num_microbatches}."
        )
    return tuple(tuple(_Rank(rank, num_stages, num_microbatches).run()) for rank in range(num_stages))


class _Rank:
    """One rank's step. A receive is for the next microbatch of its chunk and direction."""

    def __init__(self, rank: int, num_stages: int, num_microbatches: int) -> None:
        self.rank, self.size, self.count = rank, num_stages, num_microbatches
        self.is_last = rank == num_stages - 1
        self.done = {"F": [0, 0], "B": [0, 0]}
        """Passes of each chunk so far."""
        self.steps: list[Step] = []

    def run(self) -> list[Step]:
        self._together(self._receive("F", 0))
        sent = self._warm_up()
        second, gradients = self._second_chunk_in_turns(*self._both_chunks_forward(sent))
        gradients = self._both_directions(second, gradients)
        self._cool_down(gradients)
        return [step for step in self.steps if isinstance(step, Action) or step.messages]

    def _warm_up(self) -> Messages:
        """Run the first chunk's forwards until the second chunk's first input arrives; return the pending send."""
        sent: Messages = ()
        number = 2 * (self.size - 1 - self.rank)
        for k in range(number):
            sent = self._compute("F", 0)
            if k < number - 1:
                self._together(sent + self._receive("F", 0))
            else:
                self._together(self._receive("F", 0))
                self._post(sent)
        return sent

    def _both_chunks_forward(self, sent: Messages) -> tuple[Messages, Messages, Messages]:
        """Alternate forwards of both chunks; return both pending sends and the pending first gradient."""
        received: Messages = ()
        first, second, gradient = (), (), ()  # type: tuple[Messages, Messages, Messages]
        for k in range(self.rank + 1):
            self._wait(received)
            output = self._compute("F", 0)
            self._wait(first)
            first = ()
            if not self.is_last:
                self._together(self._receive("F", 1))
            received = self._receive("F", 0)
            self._post(received)
            self._wait(sent)
            self._wait(second)
            sent = ()
            second = self._compute("F", 1)
            if k == self.rank:
                gradient = self._receive("B", 1)
                if self.is_last:
                    self._post(gradient)
                else:
                    self._together(gradient)
                    gradient = ()
            self._post(second)
            if not self.is_last:
                first = output
                self._post(first)
        self._wait(received)
        return first, second, gradient

    def _second_chunk_in_turns(
        self, first: Messages, second: Messages, gradient: Messages
    ) -> tuple[Messages, Messages]:
        """Alternate a backward and a forward of the second chunk; return the pending messages: its send and the
        gradient."""
        for _ in range(self.size - 1 - self.rank):
            self._together(self._compute("B", 1))
            self._wait(second)
            self._wait(first)
            first = ()
            self._together(self._receive("F", 1))
            second = self._compute("F", 1)
            self._together(self._receive("B", 1))
            self._post(second)
        return second, gradient

    def _both_directions(self, second: Messages, gradients: Messages) -> Messages:
        """Run a forward of one chunk and a backward of the other, with chunks swapping roles; return the pending
        messages of gradients."""
        ahead = 0
        for _ in range(2 * (self.count - self.size) + self.rank + 1):
            behind, onward = 1 - ahead, ()  # type: int, Messages
            stays = self.is_last and ahead == 0
            """Whether the rank itself needs its output: the chain turns here."""
            if self.done["F"][ahead] < self.count:
                sent = self._compute("F", ahead)
                if ahead == 1 and self.done["F"][0] == self.count:
                    onward = sent
                elif not stays:
                    onward = self._beside(sent, self._receive("F", behind), ahead)
                self._post(onward)
                self._wait(gradients)
                gradients = self._beside(self._compute("B", behind), self._receive("B", ahead), ahead)
                self._post(gradients)
                self._wait(onward)
                self._wait(second)
                second = ()
            else:
                if behind == 1 and self.done["F"][1] < self.count:
                    self._together(self._receive("F", 1))
                self._wait(gradients)
                self._together(self._beside(self._compute("B", behind), self._receive("B", ahead), ahead))
                gradients = ()
            ahead = behind
        self.behind = 1 - ahead
        return gradients

    def _cool_down(self, gradients: Messages) -> None:
        """Run the remaining backwards: alternately of both chunks, then of the first."""
        chunk, received = self.behind, ()  # type: int, Messages
        for k in range(self.size):
            if self.done["B"][chunk] == self.count:
                chunk = 1 - chunk
            self._wait(gradients)
            self._wait(received)
            gradients = received = ()
            sent = self._compute("B", chunk)
            if k == self.size - 1:
                gradients = sent
                self._post(gradients)
            elif k >= self.rank:
                gradients, received = sent, self._receive("B", chunk)
                self._post(gradients)
                self._post(received)
            else:
                self._together(self._beside(sent, self._receive("B", 1 - chunk), 1 - chunk))
            chunk = 1 - chunk
        self._wait(gradients)

    def _beside(self, sent: Messages, received: Messages, chunk: int) -> Messages:
        """Return both messages with one neighbour: the next rank for chunk 0, the previous one for chunk 1."""
        has_neighbour = not self.is_last if chunk == 0 else self.rank > 0
        return sent + received if has_neighbour else ()

    def _compute(self, kind: str, chunk: int) -> Messages:
        """Run the next pass of a chunk; return the message with its output."""
        microbatch = self.done[kind][chunk]
        self.done[kind][chunk] += 1
        self.steps.append(Action(kind, chunk, microbatch))
        return self._message(kind, chunk, microbatch, sends=True)

    def _receive(self, kind: str, chunk: int) -> Messages:
        """Return the message with the input of a chunk's next pass."""
        return self._message(kind, chunk, self.done[kind][chunk], sends=False)

    def _message(self, kind: str, chunk: int, microbatch: int, *, sends: bool) -> Messages:
        stage = chain_stage(self.rank, chunk, self.size)
        boundary = stage if (kind == "F") == sends else stage - 1
        turns = self.size - 1
        """The boundary between the two chunks of the last rank."""
        if boundary == turns or not 0 <= boundary < 2 * self.size - 1 or microbatch == self.count:
            return ()
        return (Message(kind, boundary, microbatch, sends),)

    def _together(self, messages: Messages) -> None:
        self.steps.append(SendReceive(messages))

    def _post(self, messages: Messages) -> None:
        self.steps.append(Post(messages))

    def _wait(self, messages: Messages) -> None:
        self.steps.append(Wait(messages))
