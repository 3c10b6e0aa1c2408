"""Layouts that a model could train in, as requests; legality is decided by ``read_workload`` alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.predict.uneven_stages import UnevenStages

_MICRO_BATCHES = (1, 2, 4, 8)
_VIRTUAL = (1, 2, 3, 4)
_RECOMPUTE = ("none", "selective", "full")
MOST_EXPERT_RANKS = 64
"""Expert sizes worth trying end here, or at the node's devices."""


def _divisors(number: int, limit: int) -> list[int]:
    return [size for size in range(1, min(number, limit) + 1) if number % size == 0]


_MOST_DEVICES, _MOST_LAYERS = 2**20, 4096


def _whole(section: Mapping[str, Any], key: str, name: str) -> int:
    """Return a count of a request, 0 where it says nothing; ``ConfigError`` for anything but a whole number."""
    value = section.get(key) or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ConfigError(f"{name}.{key} is {shown(value)}; it must be a whole number of at least 1.")
    return value


def candidates(base: Mapping[str, Any], extra_devices: tuple[Device, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield every combination of tensor, pipeline, context, expert, expert tensor, virtual, micro batch and recompute.

    Layers that do not split evenly are placed so that the slowest stage takes least.

    ``base``: a request whose ``parallel`` may be empty; what it does name is held. Tensor sizes stay inside a node, for
    their collectives are on the critical path of every layer; expert sizes leave it where a model has many experts.
    Raises ``ConfigError`` without devices or layers.
    """
    hardware, model = base.get("hw") or {}, base.get("model") or {}
    held, train = dict(base.get("parallel") or {}), dict(base.get("train") or {})
    devices, layers = hardware.get("num_gpus"), model.get("num_layers")
    if not isinstance(devices, int) or devices < 1 or not isinstance(layers, int) or layers < 1:
        raise ConfigError(f"hw.num_gpus is {devices!r} and model.num_layers {layers!r}; both must be at least 1.")
    if devices > _MOST_DEVICES or layers > _MOST_LAYERS:
        raise ConfigError(
            f"hw.num_gpus {shown(devices)} and model.num_layers {shown(layers)}: at most "
            f"{_MOST_DEVICES} and {_MOST_LAYERS}."
        )
    node = _whole(hardware, "gpus_per_node", "hw") or min(8, devices)
    long = _whole(model, "seq", "model") >= 8192
    experts = _whole(model, "num_experts", "model")

    def choices(name: str, values: list[int]) -> list[Any]:
        return [held[name]] if held.get(name) is not None else values

    axes = (
        choices("tp", _divisors(devices, node)),
        choices("pp", [size for size in _divisors(devices, devices) if size <= layers]),
        choices("cp", _divisors(devices, 16) if long else [1]),
        choices("ep", _divisors(devices, max(node, min(int(experts), MOST_EXPERT_RANKS))) if experts else [1]),
        choices("vpp", list(_VIRTUAL)),
        [train["mbs"]] if train.get("mbs") else list(_MICRO_BATCHES),
        [train["recompute"]] if train.get("recompute") else list(_RECOMPUTE),
    )
    stages = UnevenStages(base, extra_devices)
    for tensor, pipeline, context, expert, virtual, micro, recompute in itertools.product(*axes):
        if devices % (tensor * pipeline * context) or (virtual > 1 and pipeline == 1):
            continue
        parallel = {**held, "tp": tensor, "pp": pipeline, "cp": context, "ep": expert, "vpp": virtual}
        # Tensor ranks share every expert, or each has whole ones.
        split = choices("etp", [1, tensor]) if experts and tensor > 1 else [None]
        for expert_tensor in split:
            layout = parallel if expert_tensor is None else {**parallel, "etp": expert_tensor}
            layout = {**layout, **stages.placement(layout)}
            yield {**base, "parallel": layout, "train": {**train, "mbs": micro, "recompute": recompute}}
