"""What emulated stages send: tensors that say who made them, so that a misdirected message is found at once."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Payload(NamedTuple):
    """The first three numbers of every message."""

    is_gradient: bool
    virtual_stage: int
    """Of the stage that computed it."""
    microbatch: int

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` of three numbers or more, filled."""
        flat = tensor.view(-1)
        flat.zero_()
        flat[:3] = torch.tensor([float(self.is_gradient), float(self.virtual_stage), float(self.microbatch)])
        return tensor

    @classmethod
    def read(cls, tensor: torch.Tensor) -> Payload:
        kind, stage, microbatch = tensor.detach().reshape(-1)[:3].tolist()
        return cls(bool(kind), int(stage), int(microbatch))

    def check(self, tensor: torch.Tensor) -> None:
        found = Payload.read(tensor)
        if found != self:
            raise AssertionError(f"the schedule handed over {found}, computed here is what follows {self}")

    @property
    def boundary(self) -> int:
        """The virtual stage before the boundary that it crosses."""
        return self.virtual_stage - 1 if self.is_gradient else self.virtual_stage
