"""When a generator's microbatches are exchanged: at places of the stock 1F1B schedule that stages reach together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.generators import GeneratorStep


class GeneratorSchedule:
    """Brings every stage to the exchange of a microbatch while the last stage is between its forward and backward.

    Exchange m is at the end of the forward of microbatch m + d on the stage d before the last: its input came from the
    stage before, which sends it before its own exchange m; its output is sent afterwards, and the last stage does not
    wait for it. Where no forward is left (the last d microbatches), the exchanges are at the start of the first
    backward after the last forward: all inputs are sent by then, and the gradient that this backward takes left the
    next stage before that stage's last forward. Nothing a stage does before an exchange waits for what another does
    after it.
    """

    def __init__(
        self, steps: Sequence[GeneratorStep], *, stage: int, num_stages: int, num_microbatches: int, forward_only: bool
    ) -> None:
        self._steps, self._behind = steps, num_stages - 1 - stage
        self._num_microbatches, self._forward_only = num_microbatches, forward_only
        if steps and num_microbatches < num_stages:
            raise ConfigError(
                f"{steps[0].name} needs at least as many microbatches as the backbone has stages, but there are "
                f"{num_microbatches} for {num_stages} stages. Raise the global batch, or use fewer stages."
            )

    def before_forward(self, count: int) -> None:
        """Note that the first model chunk's forward number ``count`` begins."""
        for step in self._steps:
            if not self._behind and not self._forward_only:
                step.check_done(count)
            step.current = count

    def after_forward(self, count: int, output: Any) -> Any:
        """Exchange what is due after forward number ``count``; return the output to hand to the schedule."""
        if not self._steps:
            return output
        if not self._behind:
            for step in self._steps:
                step.after_forward()
            return output
        if count >= self._behind:
            self._exchange(count - self._behind)
        if count == self._num_microbatches - 1 - self._behind and not self._forward_only:
            if not output.requires_grad:
                # The first stage of a frozen decoder: its backward must begin all the same.
                output = output + torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
            output.register_hook(self._exchange_rest)
        return output

    def after(self) -> None:
        """Exchange what is left once the schedule is through."""
        if not self._behind:
            for step in self._steps:
                step.check_done(self._num_microbatches)
        else:
            self._exchange_rest(None)

    def _exchange_rest(self, gradient: Any) -> None:
        for step in self._steps:
            for microbatch in range(step.done, self._num_microbatches):
                step.exchange(microbatch, None)

    def _exchange(self, microbatch: int) -> None:
        for step in self._steps:
            step.exchange(microbatch, None)
