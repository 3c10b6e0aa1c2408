"""Layouts that a model could train in, as requests; legality is decided by ``read_workload`` alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_autoparallel.errors import ConfigError

_MICRO_BATCHES = (1, 2, 4, 8)
_VIRTUAL = (1, 2, 3, 4)
_RECOMPUTE = ("none", "selective", "full")
_MOST_EXPERT_RANKS = 64


def _divisors(number: int, limit: int) -> list[int]:
    return [size for size in range(1, min(number, limit) + 1) if number % size == 0]


def candidates(base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of tensor, pipeline, context, expert, expert tensor, virtual, micro batch and recompute.

    ``base``: a request whose ``parallel`` may be empty; what it does name is held. Tensor sizes stay inside a node, for
    their collectives are on the critical path of every layer; expert sizes leave it where a model has many experts.
    Raises ``ConfigError`` without devices or layers.
    """
    hardware, model = base.get("hw", {}), base.get("model", {})
    held, train = dict(base.get("parallel") or {}), dict(base.get("train") or {})
    devices, layers = hardware.get("num_gpus"), model.get("num_layers")
    if not isinstance(devices, int) or devices < 1 or not isinstance(layers, int) or layers < 1:
        raise ConfigError(f"hw.num_gpus is {devices!r} and model.num_layers {layers!r}; both must be at least 1.")
    node = int(hardware.get("gpus_per_node") or min(8, devices))
    long = int(model.get("seq") or 0) >= 8192
    experts = model.get("num_experts") or 0

    def choices(name: str, values: list[int]) -> list[Any]:
        return [held[name]] if held.get(name) is not None else values

    axes = (
        choices("tp", _divisors(devices, node)),
        choices("pp", [size for size in _divisors(devices, devices) if size <= layers]),
        choices("cp", _divisors(devices, 16) if long else [1]),
        choices("ep", _divisors(devices, max(node, min(int(experts), _MOST_EXPERT_RANKS))) if experts else [1]),
        choices("vpp", list(_VIRTUAL)),
        [train["mbs"]] if train.get("mbs") else list(_MICRO_BATCHES),
        [train["recompute"]] if train.get("recompute") else list(_RECOMPUTE),
    )
    for tensor, pipeline, context, expert, virtual, micro, recompute in itertools.product(*axes):
        if devices % (tensor * pipeline * context) or (virtual > 1 and pipeline == 1):
            continue
        parallel = {**held, "tp": tensor, "pp": pipeline, "cp": context, "ep": expert, "vpp": virtual}
        # Tensor ranks share every expert, or each has whole ones.
        split = choices("etp", [1, tensor]) if experts and tensor > 1 else [None]
        for expert_tensor in split:
            layout = parallel if expert_tensor is None else {**parallel, "etp": expert_tensor}
            yield {**base, "parallel": layout, "train": {**train, "mbs": micro, "recompute": recompute}}
