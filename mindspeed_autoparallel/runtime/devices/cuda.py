"""NVIDIA GPUs."""

from __future__ import annotations

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.accelerator import Accelerator


class CudaAdapter(Accelerator):
    """``torch.cuda`` with nccl."""

    name = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "cuda was requested, but torch sees no GPU. Check nvidia-smi and that torch is a CUDA build, or set "
                "MINDSPEED_AUTOPARALLEL_DEVICE=cpu."
            )
        super().__init__(torch.cuda)

    def fingerprint(self) -> dict[str, str]:
        """Add the CUDA release torch was built with."""
        import torch

        return {**super().fingerprint(), "cuda": str(torch.version.cuda)}
