"""When macro-batches are encoded and taken back: all before and after the schedule, or along with it."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.runtime.hetero.macrobatches import EncoderStep


class UpfrontSchedule:
    """Memory modes upfront and recompute: everything before the schedule, every backward after it.

    A macro-batch's rows travel while the next one is encoded, its gradients while the one before runs backward.
    """

    def __init__(self, steps: Sequence[EncoderStep]) -> None:
        self._steps = steps

    def before(self) -> None:
        for step in self._steps:
            step.encode(range(len(step)))

    def at_forward(self, count: int) -> None:
        """Do nothing: all is done when the schedule reaches its forward number ``count``."""

    def after(self) -> None:
        for step in self._steps:
            step.take_back(range(len(step)))


class WindowedSchedule:
    """Memory mode window: a macro-batch is encoded when the first stage reaches it and taken back when the first stage
    is through with it, so that a few of them live at a time.

    Encoding is collective over ranks that stand at different places of the schedule. A tick is a place that all can
    reach without each other: tick t is before the forward of microbatch t on stage 0, and before that of microbatch
    t - p on stage p (where t < p, before the schedule). Under 1F1B stage 0 has finished the backward of microbatch
    t - num_stages by then, and nothing a stage does before its tick waits for what another does after the same tick.
    """

    def __init__(self, steps: Sequence[EncoderStep], *, stage: int, num_stages: int, num_microbatches: int) -> None:
        self._steps, self._stage, self._num_stages = steps, stage, num_stages
        self._num_microbatches = num_microbatches
        self._encoded = [0] * len(steps)
        self._taken_back = [0] * len(steps)

    def before(self) -> None:
        for tick in range(min(self._stage, self._num_microbatches)):
            self._tick(tick)

    def at_forward(self, count: int) -> None:
        if count + self._stage < self._num_microbatches:
            self._tick(count + self._stage)

    def after(self) -> None:
        self._take_back(self._num_microbatches - 1)

    def _tick(self, tick: int) -> None:
        self._take_back(tick - self._num_stages)
        for number, step in enumerate(self._steps):
            k = self._encoded[number]
            if k < len(step) and step.first_microbatch(k) == tick:
                step.encode([k])
                self._encoded[number] += 1

    def _take_back(self, last_done: int) -> None:
        for number, step in enumerate(self._steps):
            while self._taken_back[number] < len(step) and step.last_microbatch(self._taken_back[number]) <= last_done:
                step.take_back([self._taken_back[number]])
                self._taken_back[number] += 1
