"""MindSpeed's own DualPipeV schedule, taken out of its checkout: what its module imports beside Megatron stands in.

Its layers and its split of weight gradients, which only they take part in, need NPUs; order and messages do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import queue
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

SCHEDULES = Path("mindspeed/core/pipeline_parallel/dualpipev/dualpipev_schedules.py")
_LAYERS = "mindspeed.core.transformer.moe.moe_feature.fb_overlap."


class _WeightGradStore:
    """Nothing is put off: no layer here asks for it."""

    weight_grad_queue: queue.Queue[Any] = queue.Queue()

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: None


def schedule_of(sources: str) -> Callable[..., Any]:
    """Return the schedule function of a MindSpeed checkout, without ``--moe-fb-overlap``."""
    arguments = argparse.Namespace(moe_fb_overlap=False, dualpipev_dw_detach=False, overlap_grad_reduce=False)
    names: dict[str, dict[str, Any]] = {
        "megatron.training": {"get_args": lambda: arguments},
        "megatron.core.models.gpt": {"GPTModel": object},
        _LAYERS + "gpt_model": {"gpt_model_backward": None},
        _LAYERS + "transformer_layer": {"P2PCommParams": None},
        _LAYERS + "modules.weight_grad_store": {"WeightGradStore": _WeightGradStore()},
        _LAYERS + "modules.utils": {"detach_tensor": None},
        _LAYERS + "vpp_schedules": {"forward_step_func_wrapper": lambda function: function},
    }
    modules = {}
    for name, members in names.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(members)
    spec = importlib.util.spec_from_file_location("dualpipev_schedules", Path(sources) / SCHEDULES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    module.set_shared_embedding_from_dual_chunk = lambda *chunks: None  # there are no embeddings
    return module.forward_backward_pipelining_with_cutinhalf  # type: ignore[no-any-return]
