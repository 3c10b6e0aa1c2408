"""Outputs of an encoder during the backbone's schedule: precomputed rows, as leaves that accumulate gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.hetero.modules import Encoder


class EncoderOutputCache:
    """The rows of one step's microbatches; ``current``: the first model chunk's current microbatch."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._original = encoder, encoder.module.forward
        self._leaves: dict[int, torch.Tensor] = {}
        self._given: set[int] = set()
        self._asked: set[int] = set()
        self.current = -1

    def put(self, microbatch: int, rows: torch.Tensor, with_gradient: bool) -> None:
        """Store the microbatch's rows, with items in the order of the batch."""
        self._leaves[microbatch] = rows.requires_grad_(with_gradient)
        self._given.add(microbatch)

    def take_gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient of the microbatch's rows, and drop the rows."""
        leaf = self._leaves.pop(microbatch)
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def forget(self, microbatch: int) -> None:
        self._leaves.pop(microbatch, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapter = self._encoder.adapter
        self._asked.add(self.current)
        leaf = self._leaves.get(self.current)
        if leaf is None:
            device = next(self._encoder.module.parameters()).device
            leaf = torch.zeros((0, *adapter.output_shape), dtype=adapter.output_dtype, device=device)
        return adapter.embeddings(leaf)

    def check_all_used(self) -> None:
        unused = sorted(self._given - self._asked)
        if unused:
            raise ConfigError(
                f"the model never called {self._encoder.name} for microbatch {unused[0]}, which has items for it. "
                "The forward step must call the encoder wherever the batch has inputs for it."
            )

    def patched_forward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which calls of the encoder module return the stored rows."""
        return replaced(self._encoder.module, "forward", self)

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which calls run the encoder module, also within ``patched_forward``."""
        return replaced(self._encoder.module, "forward", self._original)
