"""Ascend NPUs, through torch_npu's public names only (checked against its wheels in tests/contract)."""

from __future__ import annotations

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.accelerator import Accelerator


class NpuAdapter(Accelerator):
    """``torch.npu`` with hccl."""

    name = "npu"
    backend = "hccl"

    def __init__(self) -> None:
        try:
            import torch_npu
        except Exception as error:
            raise ConfigError(
                f"npu was requested, but torch_npu cannot be imported: {error}. Install the torch-npu release "
                "that fits torch, and source CANN's set_env.sh."
            ) from error
        if not torch_npu.npu.is_available():
            raise ConfigError(
                "npu was requested, but torch_npu sees no NPU. Check npu-smi info and ASCEND_RT_VISIBLE_DEVICES."
            )
        super().__init__(torch_npu.npu)

    def prepare(self) -> None:
        """Load torch_npu's own facade, which lets Megatron's torch.cuda calls reach the NPU."""
        import torch_npu.contrib.transfer_to_npu  # noqa: F401

    def fingerprint(self) -> dict[str, str]:
        """Add the releases of torch_npu and CANN."""
        import torch_npu
        import torch_npu.npu.utils

        return {
            **super().fingerprint(),
            "torch_npu": str(torch_npu.__version__),
            "cann": str(torch_npu.npu.utils.get_cann_version()),
        }
