"""Stand in for torch_npu on a machine without NPU: the names that MindSpeed, MindSpeed-MM and MindSpeed-LLM need.

Fused operators compute the same in plain torch (``operators``). Everything else that is only named at import, such as
profiler settings, is a ``Placeholder``; operators that change a result are never placeholders, so that a training
cannot go on with a wrong number. Devices are the plugin's CPU facade: ``torch.npu`` answers as ``torch.cuda`` does.
"""

import torch

from torch_npu import device
from torch_npu.operators import *  # noqa: F403
from torch_npu.placeholders import Placeholder, provide_modules

__version__ = "2.7.1"
unsupported_dtype: list[torch.dtype] = []

npu = device.provide()
provide_modules()


def __getattr__(name: str) -> object:
    # hasattr(torch_npu, "npu_...") decides whether MindSpeed uses an operator: absent means its torch version.
    if name.startswith(("__", "npu_")):
        raise AttributeError(f"the stand-in torch_npu has no {name}")
    return Placeholder(f"torch_npu.{name}")
