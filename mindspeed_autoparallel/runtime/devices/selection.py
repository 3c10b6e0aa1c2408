"""Which device this process trains on: an accelerator where one works, else the CPU, and it says so."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import lru_cache

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.adapter import DeviceAdapter

DEVICE_VARIABLE = "MINDSPEED_AUTOPARALLEL_DEVICE"
_KINDS = ("npu", "cuda", "cpu")


@lru_cache(maxsize=1)
def current_device() -> DeviceAdapter:
    """The adapter of this process; chosen once."""
    asked = os.environ.get(DEVICE_VARIABLE, "").strip().lower()
    if asked and asked not in _KINDS:
        raise ConfigError(f"{DEVICE_VARIABLE} must be one of {', '.join(_KINDS)}, got {asked!r}.")
    kind = asked or _detect()
    if kind == "npu":
        from mindspeed_autoparallel.runtime.devices.npu import NpuAdapter

        return NpuAdapter()
    if kind == "cuda":
        from mindspeed_autoparallel.runtime.devices.cuda import CudaAdapter

        return CudaAdapter()
    from mindspeed_autoparallel.runtime.devices.cpu.adapter import CpuAdapter

    if not asked and os.environ.get("RANK", "0") == "0":
        print(
            f"mindspeed_autoparallel: no NPU or GPU found, training on CPU with gloo ({DEVICE_VARIABLE} overrides)",
            file=sys.stderr,
            flush=True,
        )
    return CpuAdapter()


def prepare_for_megatron() -> None:
    """Make the device ready for Megatron; called right before Megatron is first imported."""
    current_device().prepare()


def _detect() -> str:
    if importlib.util.find_spec("torch_npu") is not None:
        # With torch_npu installed but CANN missing, importing torch itself fails through backend autoload.
        try:
            import torch_npu

            if torch_npu.npu.is_available():
                return "npu"
        except Exception as error:
            print(
                f"mindspeed_autoparallel: torch_npu is installed but cannot be used ({error}). If this machine has no "
                "NPU, set TORCH_DEVICE_BACKEND_AUTOLOAD=0; if it has, source CANN's set_env.sh first.",
                file=sys.stderr,
            )
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
