"""Layers per stage where a model's do not split evenly: as Megatron's or MindSpeed's own flags say it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.cost.analytic.layer_time import head_time, layer_time
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import behind_layers_us
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError

PLACEMENT_KEYS = (
    *("num_layer_list", "pipeline_layout", "noop_layers", "first_stage_layers", "last_stage_layers"),
    *("account_for_embedding", "account_for_loss", "layers_per_chunk", "encoder_layer_list"),
)
"""Keys of a request's ``parallel`` that say where layers lie."""
_BISECTIONS = 40


def balanced_counts(layers_us: Sequence[float], head_us: float, num_chunks: int) -> tuple[int, ...]:
    """Return layers per chunk, at least one each, whose slowest chunk takes least.

    ``head_us``: what the last chunk does beside its layers. Of equally slow splits later chunks have more layers, for
    earlier ones hold the activations of more microbatches. Raises ``ConfigError`` for more chunks than layers.
    """
    if num_chunks > len(layers_us):
        raise ConfigError(f"{len(layers_us)} layers cannot be split over {num_chunks} chunks.")
    low, high = 0.0, head_us + sum(layers_us)
    best = _filled(layers_us, head_us, num_chunks, math.inf)
    for _ in range(_BISECTIONS):
        limit = (low + high) / 2
        found = _filled(layers_us, head_us, num_chunks, limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    assert best is not None
    return best


def _filled(layers_us: Sequence[float], head_us: float, num_chunks: int, limit_us: float) -> tuple[int, ...] | None:
    """Return chunks filled from the last one on, none slower than ``limit_us``; ``None`` where that leaves layers."""
    left, counts = len(layers_us), []
    for chunk in reversed(range(num_chunks)):
        time, count = (head_us if chunk == num_chunks - 1 else 0.0), 0
        while left > chunk and (count == 0 or time + layers_us[left - 1] <= limit_us):
            left, count, time = left - 1, count + 1, time + layers_us[left - 1]
        if time > limit_us:
            return None
        counts.append(count)
    return tuple(reversed(counts)) if left == 0 else None


@dataclass(frozen=True)
class _Times:
    """Microseconds of one microbatch, forward and backward: every layer, and what the last stage does beside them."""

    layers_us: tuple[float, ...]
    head_us: float
    on_ascend: bool


_Cut = tuple[tuple[str, int], ...]


class UnevenStages:
    """Places layers of layouts that name no placement of their own; each is computed once per way to cut a layer."""

    def __init__(self, base: Mapping[str, Any], extra_devices: tuple[Device, ...] = ()) -> None:
        self._base, self._extra = base, extra_devices
        self._times: dict[_Cut, _Times | None] = {}
        self._counts: dict[tuple[_Cut, int], tuple[int, ...]] = {}
        parallel, model = base.get("parallel") or {}, base.get("model") or {}
        held = any(parallel.get(key) not in (None, False, "", []) for key in PLACEMENT_KEYS)
        # Hybrid patterns and encoders have rules of their own for stages.
        self.applies = not held and not model.get("layer_pattern") and not model.get("vision_encoder")

    def placement(self, parallel: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that place the layers of a layout; none where they split evenly or no way is known."""
        pipeline, virtual = parallel["pp"], parallel["vpp"]
        num_layers = self._base["model"]["num_layers"]
        if not self.applies or num_layers % (pipeline * virtual) == 0 or pipeline * virtual > num_layers:
            return {}
        cut = tuple((key, parallel[key]) for key in ("tp", "cp", "ep", "etp") if parallel.get(key) is not None)
        if cut not in self._times:
            self._times[cut] = self._computed(cut)
        times = self._times[cut]
        if times is None or (times.on_ascend and virtual > 1):
            return {}
        chunks = pipeline * virtual
        if (cut, chunks) not in self._counts:
            self._counts[cut, chunks] = balanced_counts(times.layers_us, times.head_us, chunks)
        counts = self._counts[cut, chunks]
        # MindSpeed's flag lists stages; Megatron's string names what is on every chunk.
        return {"num_layer_list": list(counts)} if times.on_ascend else {"pipeline_layout": self._layout(counts)}

    def _layout(self, counts: Sequence[int]) -> str:
        parts = [f"t*{count}" for count in counts]
        ahead = "m" * (self._base["model"].get("mtp_layers") or 0)
        return "|".join(["E" + parts[0], *parts[1:-1], f"{parts[-1]}{ahead}L"])

    def _computed(self, cut: _Cut) -> _Times | None:
        """Return times where layers are cut so; ``None`` where no run could."""
        held = {key: value for key, value in (self._base.get("parallel") or {}).items() if key != "dp"}
        request = {
            **self._base,
            "parallel": {**held, **dict(cut), "pp": 1, "vpp": 1},
            "train": {**self._base["train"], "mbs": 1, "gbs": self._base["hw"]["num_gpus"]},
        }
        try:
            work = read_workload(request)
        except ConfigError:
            return None
        device = find_device(work.gpu, self._extra)
        efficiency = device.efficiency(work.stack)
        fabric = Fabric.of(device, efficiency, work.devices_per_node, work.inter_node_gbit_per_s)
        of_kind = {kind: layer_time(work, device, efficiency, fabric, kind) for kind in set(work.model.layers)}
        head = head_time(work, device, efficiency)
        head_us = behind_layers_us(work, device, efficiency, fabric, head)
        layers = tuple(of_kind[kind].forward_us + of_kind[kind].backward_us for kind in work.model.layers)
        return _Times(layers, head_us, work.on_ascend)
