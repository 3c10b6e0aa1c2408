"""When encoders encode and generators exchange: around the stock schedule, or at fixed points inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.generators import GeneratorStep
from mindspeed_autoparallel.runtime.hetero.macrobatches import EncoderStep
from mindspeed_autoparallel.schedule.exchanges import Place, diagonal_places_of, places_of
from mindspeed_autoparallel.schedule.window import Tick


class UpfrontSchedule:
    """Memory modes upfront and recompute: all forwards before the schedule, all backwards after it.

    A macro-batch's rows are sent while the next one is encoded, its gradients while the previous one runs backward.
    """

    def __init__(self, steps: Sequence[EncoderStep]) -> None:
        self._steps = steps

    def before(self) -> None:
        for step in self._steps:
            step.encode(range(len(step)))

    def at_forward(self, count: int) -> None:
        """Do nothing: everything is encoded before the schedule."""

    def after(self) -> None:
        for step in self._steps:
            step.take_back(range(len(step)))


class WindowedSchedule:
    """Memory mode window: a macro-batch is encoded when the first stage reaches it, and its backward runs when the
    first stage has finished it, so that only a few are alive at a time.

    Encoding is collective over ranks at different points of the schedule. A tick is a point that all ranks reach
    without waiting for one another: the tick of stage 0's forward f comes before forward f - p on stage p, or before
    the schedule if f < p. Stage p's inputs for earlier forwards and backwards were computed by its neighbours before
    the same tick: a stage is one forward ahead of the next, and two warm-up forwards ahead under the interleaved
    schedule.
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


class GeneratorSchedule:
    """Brings every stage to the exchange of a microbatch while the last stage is between its forward and backward.

    ``schedule.exchanges`` has the places. Forward-only, exchange m follows the forward of microbatch m + d on the stage
    that is d before the last; the previous stage sends this forward's input before its own exchange m.
    """

    def __init__(
        self,
        steps: Sequence[GeneratorStep],
        *,
        stage: int,
        num_stages: int,
        num_microbatches: int,
        forward_only: bool,
        diagonal: bool = False,
    ) -> None:
        """Schedule the exchanges of ``steps``. ``diagonal``: encoders also exchange inside the schedule."""
        self._steps, self._forward_only = steps, forward_only
        self._is_last, self._num_microbatches = stage == num_stages - 1, num_microbatches
        if steps and num_microbatches < num_stages:
            raise ConfigError(
                f"{steps[0].name} needs at least as many microbatches as the backbone has stages, but there are "
                f"{num_microbatches} for {num_stages} stages. Raise the global batch, or use fewer stages."
            )
        self._places: Sequence[Place] = ()
        if steps and not self._is_last:
            where = diagonal_places_of if diagonal or forward_only else places_of
            self._places = where(num_stages, num_microbatches, stage)

    def before_forward(self, count: int) -> None:
        """Run the exchanges due before the first model chunk's forward number ``count``, which begins now."""
        self._exchange("before_forward", count)
        for step in self._steps:
            if self._is_last and not self._forward_only:
                step.check_done(count)
            step.current = count

    def after_forward(self, count: int, output: Any) -> Any:
        """Run the exchanges due after forward number ``count``; return the output for the schedule."""
        if self._is_last:
            for step in self._steps:
                step.after_forward()
            return output
        self._exchange("after_forward", count)
        if Place("before_backward", count) in self._places and not self._forward_only:
            if not output.requires_grad:
                # On the first stage of a frozen decoder, the backward must run nevertheless.
                output = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
            output.register_hook(lambda gradient: self._exchange("before_backward", count))
        return output

    def after(self) -> None:
        """Run the remaining exchanges after the schedule."""
        for step in self._steps:
            if self._is_last:
                step.check_done(self._num_microbatches)
            while step.done < len(self._places):
                step.exchange(step.done, None)

    def _exchange(self, kind: str, count: int) -> None:
        place = Place(kind, count)
        for step in self._steps:
            while step.done < len(self._places) and self._places[step.done] == place:
                step.exchange(step.done, None)
