"""Hybrid models: planned with computed costs, cut by their pattern as Megatron's own functions read it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.megatron.hybrid import cut_pattern, hybrid_pattern, num_pattern_layers
from mindspeed_autoparallel.runtime.megatron.layout_arguments import native_flags, stage_arguments
from mindspeed_autoparallel.runtime.profiling.measure.structure import (
    choices_by_layer,
    choices_of_layers,
    fewest_layers,
    shorten,
)
from mindspeed_autoparallel.runtime.profiling.sources.analytic import computed_profile
from mindspeed_autoparallel.spec import Cluster, Layout

PATTERN = "M-M-M-M*-M-M-M-M*-M-M-M*-"
NEMOTRON = {
    "mm_model": None,
    "num_layers": None,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "ffn_hidden_size": 21504,
    "seq_length": 4096,
    "vocab_size": 131072,
    "untie_embeddings_and_output_weights": True,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
    "pipeline_model_parallel_layout": None,
    "profile_source": "analytic",
}


def _arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**NEMOTRON, "hybrid_layer_pattern": PATTERN, **changes})


def _whole(flags: dict[str, Any]) -> dict[str, Any]:
    """Return ``flags`` with lists as long as twelve layers."""
    return {name: value + value[-1:] * 8 if isinstance(value, list) else value for name, value in flags.items()}


def test_layers_come_from_the_pattern_and_stages_of_it_are_layout() -> None:
    plain, cut = describe(_arguments()), describe(_arguments(hybrid_layer_pattern="M-M-|M-M*-M-M-M-M*-M-M-M*-"))
    assert [module.num_layers for module in plain.modules] == [25]
    assert plain.model_hash == cut.model_hash
    assert plain.model_hash != describe(_arguments(hybrid_layer_pattern=PATTERN[:-1] + "M")).model_hash
    assert num_pattern_layers(hybrid_pattern(_arguments(hybrid_layer_pattern="M*|M*/MM/MM"))) == 4


def test_patterns_are_cut_by_the_plan() -> None:
    assert cut_pattern("M*M-M/MM/MM", (2, 1, 2)) == "M*|M|-M/MM/MM"
    with pytest.raises(PlanError, match=r"has \[2, 0, 3\] layers on its stages"):
        cut_pattern("M*M-M", (2, 0, 3))
    with pytest.raises(PlanError, match=r"the pattern M\*M-M has 5"):
        cut_pattern("M*M-M", (2, 2))


def test_a_measured_beginning_shows_every_kind_and_names_the_kinds_of_all_layers() -> None:
    arguments = _arguments(hybrid_layer_pattern="M-M-|M*M-/M*")
    choices = choices_of_layers(arguments, 8)
    assert "".join(map(str, choices)) == "M-M-M*M-"
    assert fewest_layers(choices) == 6
    kept = choices_by_layer(arguments)
    shorten(arguments, 6)
    assert arguments.hybrid_layer_pattern == "M-M-M*/M*"
    shorten(arguments, 2, kept)
    assert arguments.hybrid_layer_pattern == "M-/M*"


def test_the_deprecated_name_of_a_pattern_is_read_and_not_left_beside_the_new_one() -> None:
    arguments = _arguments(hybrid_layer_pattern=None, hybrid_override_pattern=PATTERN)
    assert hybrid_pattern(arguments) == PATTERN
    shorten(arguments, 4)
    assert (arguments.hybrid_layer_pattern, arguments.hybrid_override_pattern) == (PATTERN[:4], None)


@pytest.mark.parametrize(
    ("flags", "choices"),
    [
        ({"moe_layer_freq": [0, 0, 0, 1]}, 4),
        ({"moe_layer_freq": 2, "linear_attention_freq": 3}, 6),
        ({"moe_layer_freq": 1}, 2),
    ],
)
def test_lists_and_frequencies_say_how_many_layers_show_every_kind(flags: dict[str, Any], choices: int) -> None:
    # Two layers of a model whose first three are dense would have been measured as if all were.
    assert fewest_layers(choices_of_layers(_arguments(hybrid_layer_pattern=None, **_whole(flags)), 12)) == choices


@pytest.mark.megatron
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_plan_of_a_hybrid_model_is_read_back_by_megatron(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_allocation")
    import torch

    arguments = _arguments()
    profile = computed_profile(arguments, describe(arguments), find_device("H100"), 8)
    (cost,) = profile.measurements[0].modules.values()
    assert len(cost.kinds) == 3
    layout = Layout(pipeline_size=4, virtual_size=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    options = SearchOptions(layouts=[layout], with_relaxations=False, time_limit_s=3)
    plan = search(profile, Cluster(num_nodes=1, devices_per_node=4), 16, options)
    counts = plan.layers_of("text_decoder")
    assert len(set(counts)) > 1, "kinds differ, and so do stages"
    stages = stage_arguments(plan, arguments)
    pattern = stages["hybrid_layer_pattern"]
    assert allocation.get_hybrid_total_layer_count(pattern) == 25
    assert allocation.get_hybrid_total_pipeline_segment_count(pattern) == 4 * chunks
    assert native_flags(plan, stages)[-1] == pattern
    found = []
    monkeypatch.setattr(allocation, "log_on_each_pipeline_stage", lambda *words, **more: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    for v in range(4 * chunks):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, v=v: v % 4)
        letters, offset = allocation.select_pipeline_segment(pattern, object(), v // 4 if chunks > 1 else None)
        assert "".join(letters) == PATTERN[offset : offset + len(letters)]
        found.append(len(letters))
    assert tuple(found) == counts
