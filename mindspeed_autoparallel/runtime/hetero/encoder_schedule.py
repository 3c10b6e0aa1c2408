"""When macro-batches are encoded and taken back: all before and after the schedule, or along with it."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.runtime.hetero.macrobatches import EncoderStep
from mindspeed_autoparallel.schedule.window import Tick


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
        """Do nothing: all is done when the schedule reaches forward number ``count`` of the rank's model chunks."""

    def after(self) -> None:
        for step in self._steps:
            step.take_back(range(len(step)))


class WindowedSchedule:
    """Memory mode window: a macro-batch is encoded when the first stage reaches it and taken back when the first stage
    is through with it, so that a few of them live at a time.

    Encoding is collective over ranks that stand at different places of the schedule. A tick is a place that all can
    reach without each other: that of forward number f on stage 0 is before number f - p on stage p (where f < p, before
    the schedule). What stage p needs for the forwards and backwards before that, its neighbours did before the same
    tick: a stage is one forward ahead of the next, and two warm-up forwards ahead under the interleaved schedule.
    """

    def __init__(self, steps: Sequence[EncoderStep], *, stage: int, ticks: Sequence[Tick]) -> None:
        self._steps = steps
        self._early = [tick for tick in ticks if tick.forward < stage]
        self._ticks = {tick.forward - stage: tick for tick in ticks if tick.forward >= stage}
        self._last_microbatch = len(ticks) - 1
        self._encoded = [0] * len(steps)
        self._taken_back = [0] * len(steps)

    def before(self) -> None:
        for tick in self._early:
            self._tick(tick)

    def at_forward(self, count: int) -> None:
        if count in self._ticks:
            self._tick(self._ticks[count])

    def after(self) -> None:
        self._take_back(self._last_microbatch)

    def _tick(self, tick: Tick) -> None:
        self._take_back(tick.last_done)
        for number, step in enumerate(self._steps):
            k = self._encoded[number]
            if k < len(step) and step.first_microbatch(k) == tick.microbatch:
                step.encode([k])
                self._encoded[number] += 1

    def _take_back(self, last_done: int) -> None:
        for number, step in enumerate(self._steps):
            while self._taken_back[number] < len(step) and step.last_microbatch(self._taken_back[number]) <= last_done:
                step.take_back([self._taken_back[number]])
                self._taken_back[number] += 1
