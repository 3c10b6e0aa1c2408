"""Imported by a training script in front of megatron: its ranks are real, and followed as a pre-flight follows one.

The environment names the task as in a pre-flight's child; process groups stay gloo's.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_autoparallel.runtime.features.preflight.watch import PreflightWatch
from mindspeed_autoparallel.runtime.profiling import alone

leave = PreflightWatch.leave


def leave_together(self: PreflightWatch, *words: Any) -> None:
    """End when every rank has come to its end."""
    torch.distributed.barrier()
    leave(self, *words)


alone.install = lambda: None
PreflightWatch.leave = leave_together
