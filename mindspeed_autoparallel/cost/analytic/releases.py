"""What a container of NVIDIA NeMo implies for switches that a request leaves open: its recipes' and its libraries'.

Sources: the performance recipes of Megatron-Bridge v0.1.0 (container 25.09), v0.2.0 (25.11), v0.3.0 (26.02), v0.4.0 to
v0.4.2 (26.04) and v0.5.0 (26.06), and the versions in its ``docs/releases/software-versions.md``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mindspeed_autoparallel.cost.analytic.reading_train import GRAPHS
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.errors import ConfigError


class Release(NamedTuple):
    """Year and month of a container, as 26.04."""

    year: int
    month: int


_FUSED_LATENT_ATTENTION = Release(25, 9)
"""First listed container whose Transformer Engine (2.7) has fused attention on Blackwell for heads whose queries and
values differ in size: 2.5 with cuDNN 9.11 is the first release, and 25.04's has none."""
_BRIDGE = Release(25, 9)
"""First recipes of Megatron-Bridge, which choose Transformer Engine's loss and recompute the up-projections
of latent attention."""
_RACK_KERNELS = Release(25, 11)
"""First recipes that send tokens by HybridEP on racks of NVLink, and that capture parts of layers in graphs."""
_NODE_KERNELS = Release(26, 2)
"""First recipes with such kernels on other machines too; before, only DeepSeek-V3 on H100 has DeepEP."""
_WHOLE_GRAPHS = Release(26, 6)
"""First mxfp8 recipes of models with experts that hide exchanges inside a node or rack, that capture whole
iterations and whose attention is quantized."""


def read_release(train: Mapping[str, object]) -> Release | None:
    """Return the container that ``train.software`` names; raises ``ConfigError`` if it names none."""
    name = train.get("software")
    if name is None:
        return None
    written = r"(?:(?:.*\W)?nemo[-:])?(\d\d)\.(\d\d)(?:\.\w+)*(?: nemo.*)?"
    found = re.fullmatch(written, str(name), re.IGNORECASE)
    if not found or not 1 <= int(found.group(2)) <= 12:
        raise ConfigError(
            f"train.software is {name!r}, must name a NeMo container by year and month, such as nemo-26.04."
        )
    return Release(int(found.group(1)), int(found.group(2)))


def with_release(work: Workload, model: Mapping[str, object], train: Mapping[str, object]) -> Workload:
    """Return ``work`` with the switches that its release implies, and that ``model`` and ``train`` leave open.

    Without a release: those of the newest mxfp8 recipes, where Megatron accepts them, and Megatron's own defaults.
    """
    release = read_release(train)
    changes: dict[str, Any] = {}
    if work.expert_overlap and not work.on_ascend and not _can_hide_exchanges(work):
        changes["expert_overlap"] = False
    hidden = train.get("moe_a2a_overlap") is None and _hides_exchanges(work, release)
    if hidden:
        changes["expert_overlap"] = True
        if (release is None or release >= _WHOLE_GRAPHS) and train.get("fp8_dot_product_attention") is None:
            changes["quantized_attention"] = work.on_blackwell
    graph = _graph(work, release, hidden)
    if train.get("cuda_graph") is None and graph:
        changes["replayed_launches"], changes["replays_experts"] = GRAPHS[graph]
    if model.get("dispatcher") is None and _sends_per_expert(work, release):
        changes["exchanged_per_expert"] = True
    if release and train.get("attention") is None and work.model.latent and work.on_blackwell:
        changes["fused_attention"] = release >= _FUSED_LATENT_ATTENTION
    if release and release >= _BRIDGE and work.model.latent and train.get("recompute_modules") is None:
        # Where attention is fused, running it again saves nothing.
        changes["recompute_detail"] = dataclasses.replace(work.recompute_detail, modules=("mla_up_proj",))
    if release and train.get("cross_entropy_fusion") is None and release < _BRIDGE:
        changes["cross_entropy_fusion"] = False
    return dataclasses.replace(work, **changes) if changes else work


def _hides_exchanges(work: Workload, release: Release | None) -> bool:
    """Return whether recipes hide the experts' exchanges, if Megatron accepts the switch.

    The newest mxfp8 ones do; before, those whose experts span nodes (DeepSeek-V3 on B200 in v0.4.2), in every precision
    before 26.02 (DeepSeek-V3 and Qwen3 on H100), but not if tokens are dropped.
    """
    if not _can_hide_exchanges(work) or work.gradient_overlap is False:
        return False
    if release is None or release >= _WHOLE_GRAPHS:
        return work.recipe == "mxfp8"
    spans_nodes = not work.on_rack and work.expert_size * work.expert_tensor_size > work.devices_per_node
    sought = work.recipe == "mxfp8" or release < _NODE_KERNELS
    return spans_nodes and sought and not work.model.capacity_factor


def _can_hide_exchanges(work: Workload) -> bool:
    """Return whether Megatron accepts ``--overlap-moe-expert-parallel-comm``: layers of attention, one stage or several
    chunks per rank, no full recompute."""
    possible = work.expert_size > 1 and all(kind.mixer == "attention" for kind in work.model.layers)
    return possible and (work.pipeline_size == 1 or work.virtual_size > 1) and work.recompute != "full"


def _graph(work: Workload, release: Release | None, hidden: bool) -> str:
    """Return the graphs of recipes: whole iterations in the newest mxfp8 ones (without a release, on racks only, which
    had them first), parts of layers on racks and in hybrids."""
    if release is None:
        return "full_iteration" if hidden and work.on_rack else ""
    if hidden and release >= _WHOLE_GRAPHS:
        return "full_iteration"
    hybrid = any(kind.mixer == "mamba" for kind in work.model.layers)
    captured = hybrid or (work.on_rack and work.model.num_experts > 0)
    return "transformer_engine" if captured and release >= _RACK_KERNELS else ""


def _sends_per_expert(work: Workload, release: Release | None) -> bool:
    """Return whether a token is sent once for each of its experts: in earlier recipes, and wherever tokens are dropped,
    which DeepEP's kernels do not do."""
    if work.model.capacity_factor:
        return True
    if release is None:
        return False
    return release < _RACK_KERNELS if work.on_rack else release < _NODE_KERNELS and not work.model.latent
