"""Selects the device of this process: an accelerator if one works, else the CPU, with a notice on stderr."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

from mindspeed_autoparallel.errors import ConfigError, first_line
from mindspeed_autoparallel.runtime.devices.adapter import DeviceAdapter
from mindspeed_autoparallel.runtime.first_rank import print_once

DEVICE_VARIABLE = "MINDSPEED_AUTOPARALLEL_DEVICE"
_KINDS = ("npu", "cuda", "cpu")


@lru_cache(maxsize=1)
def current_device() -> DeviceAdapter:
    """Return the adapter of this process; chosen once."""
    return select_device()


def prepare_for_megatron() -> None:
    """Make the device ready for Megatron; called right before Megatron is first imported."""
    current_device().prepare()


def select_device() -> DeviceAdapter:
    """Return the device ``MINDSPEED_AUTOPARALLEL_DEVICE`` names, else the first of npu, cuda and cpu that works.

    Raises ``ConfigError`` for an unknown name, for a requested device that does not work, and if torch is missing
    or an unusable torch_npu breaks its import.
    """
    given = os.environ.get(DEVICE_VARIABLE, "").strip().lower()
    if given and given not in _KINDS:
        raise ConfigError(f"{DEVICE_VARIABLE} must be one of {', '.join(_KINDS)}, got {given!r}.")
    _check_torch()
    kind = given or _detect()
    if kind == "npu":
        from mindspeed_autoparallel.runtime.devices.accelerator import NpuAdapter

        return NpuAdapter()
    if kind == "cuda":
        from mindspeed_autoparallel.runtime.devices.accelerator import CudaAdapter

        return CudaAdapter()
    from mindspeed_autoparallel.runtime.devices.cpu.adapter import CpuAdapter

    if not given:
        _print(f"no NPU or GPU found, training on CPU with gloo ({DEVICE_VARIABLE} overrides)")
    return CpuAdapter()


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ConfigError("torch is not installed: pip install mindspeed-autoparallel[megatron]") from error
        raise
    except Exception as error:
        if not _has_torch_npu():
            raise
        # torch autoloads an installed torch_npu; if that fails, so does the import of torch.
        raise ConfigError(
            f"torch cannot be imported because torch_npu is installed and does not work: {_reason(error)}. "
            "If this machine has an NPU, source CANN's set_env.sh first; if it has none, "
            "export TORCH_DEVICE_BACKEND_AUTOLOAD=0 or uninstall torch-npu."
        ) from error


def _detect() -> str:
    if _has_torch_npu():
        # With TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch can be imported although torch_npu is unusable.
        try:
            import torch_npu

            if torch_npu.npu.is_available():
                return "npu"
        except Exception as error:
            _print(
                f"torch_npu is installed but cannot be used ({_reason(error)}). If this machine has an NPU, source "
                "CANN's set_env.sh first; if it has none, keep TORCH_DEVICE_BACKEND_AUTOLOAD=0."
            )
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _has_torch_npu() -> bool:
    return importlib.util.find_spec("torch_npu") is not None


def _reason(error: BaseException) -> str:
    """Return the message of the root cause: autoload wraps the error that names what is missing."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error).rstrip(".")


def _print(text: str) -> None:
    print_once(f"mindspeed_autoparallel: {text}", to_stderr=True)
