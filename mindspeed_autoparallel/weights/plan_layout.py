"""The checkpoint layout a plan means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.weights.architecture import AUDIO, TEXT, VISION, Architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout

_PLACEMENT_KEYS = {VISION: "vit_layer_placement", AUDIO: "audio_layer_placement", TEXT: "llm_layer_placement"}


def layout_from_plan(path: Path, architecture: Architecture, vocab_multiple: int | None = None) -> CheckpointLayout:
    """Layers per stage and tensor size out of a plan file with ``parallel_config`` and ``layer_placement``."""
    plan = read_json(path, "plan")
    plan = plan if isinstance(plan, dict) else {}
    parallel, placement = plan.get("parallel_config"), plan.get("layer_placement")
    if not isinstance(parallel, dict) or not isinstance(placement, dict):
        raise PlanError(f"plan {path} has no 'parallel_config' with TP and 'layer_placement' with layers per stage.")
    layers = {module: _rows(placement.get(key)) for module, key in _PLACEMENT_KEYS.items()}
    tensor_size = parallel.get("TP", 1)
    if not isinstance(tensor_size, int) or tensor_size < 1:
        raise PlanError(f"plan {path}: parallel_config.TP is {tensor_size!r}, not a positive number.")
    return make_layout(
        architecture, layers=layers, tensor_sizes={TEXT: tensor_size}, vocab_multiple=vocab_multiple
    )


def _rows(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if not value:
        return None
    return tuple(map(tuple, value)) if isinstance(value[0], list) else (tuple(value),)
