"""When a generator's microbatches are exchanged: at places of the stock 1F1B schedule that stages reach together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.generators import GeneratorStep
from mindspeed_autoparallel.schedule.exchanges import Place, diagonal_places_of, places_of


class GeneratorSchedule:
    """Brings every stage to the exchange of a microbatch while the last stage is between its forward and backward.

    ``schedule.exchanges`` has the places. Without a backward, exchange m is behind the forward of microbatch m + d on
    the stage d before the last: its input came from the stage before, which sends it before its own exchange m.
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
        """Take the exchanges of ``steps``. ``diagonal``: encoders meet inside the schedule, too."""
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
        """Exchange what is due before the first model chunk's forward number ``count``, which begins now."""
        self._exchange("before_forward", count)
        for step in self._steps:
            if self._is_last and not self._forward_only:
                step.check_done(count)
            step.current = count

    def after_forward(self, count: int, output: Any) -> Any:
        """Exchange what is due after forward number ``count``; return the output to hand to the schedule."""
        if self._is_last:
            for step in self._steps:
                step.after_forward()
            return output
        self._exchange("after_forward", count)
        if Place("before_backward", count) in self._places and not self._forward_only:
            if not output.requires_grad:
                # The first stage of a frozen decoder: its backward must begin all the same.
                output = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
            output.register_hook(lambda gradient: self._exchange("before_backward", count))
        return output

    def after(self) -> None:
        """Exchange what is left once the schedule is through."""
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
