"""A rank that is played alone holds at its peak what the same rank holds among real ones.

Layouts are drawn; both sides run the same program with the same parameters and data. The long form draws 45 layouts
on four and eight ranks for the installed release, and nine for the older ones.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from script_ranks import MARKS

from mindspeed_autoparallel.profiles.preflight_result import RankReport, RankRun
from mindspeed_autoparallel.runtime.features.preflight.entry import conclude
from mindspeed_autoparallel.runtime.features.preflight.ranks import RankKind
from mindspeed_autoparallel.runtime.features.preflight.request import PreflightRequest
from mindspeed_autoparallel.spec.layout import Layout

pytestmark = MARKS

WORKER = Path(__file__).with_name("peaks_worker.py")
TOLERANCE = 0.01
NUM_DRAWN = 9
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_aux_loss_coeff": 0.0}


def draw(random_source: random.Random, world: int) -> dict[str, Any]:
    """Return a case for ``gpt_layouts`` on ``world`` ranks."""
    while True:
        tp, pp = random_source.choice((1, 2, 4)), random_source.choice((1, 2, 4))
        cp = random_source.choice((1, 1, 1, 2))
        if world % (tp * pp * cp) == 0 and tp * pp * cp > 1:
            break
    data = world // (tp * pp * cp)
    config: dict[str, Any] = {}
    case: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "config": config, "hidden": random_source.choice((64, 128))}
    case["layers"] = random_source.choice((4, 8)) if pp < 4 else 8
    case["batch"] = 8 if pp < 4 else 16
    case["shard"] = random_source.random() < 0.6
    case["overlap"] = case["shard"] and data > 1 and random_source.random() < 0.5
    case["tied"] = random_source.random() < 0.3
    case["rope"] = random_source.random() < 0.5
    case["bf16"] = random_source.random() < 0.3
    config.update(random_source.choice(({}, {}, FULL, BLOCK, SELECTIVE)))
    if tp > 1 and random_source.random() < 0.7:
        config["sequence_parallel"] = True
    if pp > 1 and random_source.random() < 0.35:
        case["vpp"], case["overlap"] = 2, False  # the program has one chunk's overlap
    if cp == 1 and data > 1 and random_source.random() < 0.4:
        case["experts"], case["ep"] = 4, 2
        config.update(EXPERTS, moe_token_dispatcher_type=random_source.choice(("alltoall", "allgather")))
        config["sequence_parallel"] = tp > 1
        case["tied"] = False
    if pp > 1 and "vpp" not in case and random_source.random() < 0.3:
        config["num_layers_in_first_pipeline_stage"] = case["layers"] // pp - 1 if case["layers"] > pp else 1
        rest = case["layers"] - config["num_layers_in_first_pipeline_stage"]
        if rest % (pp - 1):
            del config["num_layers_in_first_pipeline_stage"]
    return case


def check_verdicts(expected: list[int], played: list[int]) -> None:
    """Compare what is concluded for limits half a percent below and above the real peak of the fullest rank."""
    fullest = max(expected, default=0)
    for share, verdict in ((0.995, "runs_out"), (1.005, "fits")):
        assert not expected or verdict_of(played, int(fullest * share)) == verdict, (share, expected, played)


def verdict_of(peaks: list[int], limit_bytes: int) -> str:
    """Return the verdict of a pre-flight whose ranks have these peaks."""
    layout = Layout(pipeline_size=1, tensor_size=1, data_size=len(peaks))
    kinds = [RankKind(rank=rank, pipeline_rank=0, members=(rank,), why="a test") for rank in range(len(peaks))]
    request = PreflightRequest(
        layout=layout,
        plan=None,
        plan_path=None,
        num_microbatches=1,
        kinds=tuple(kinds),
        selected=tuple(kinds),
        num_steps=3,
        imbalance=1.0,
        timeout_s=60.0,
        limit_bytes=limit_bytes,
        limit_source="a test",
        work_dir=Path(),
        output_dir=Path(),
        samples_differ=False,
        switches=(),
    )
    reports = [
        RankReport(
            run=RankRun(rank=kind.rank, status="ok", peak_bytes=peak),
            pipeline_rank=0,
            stands_for=kind.members,
            why=kind.why,
            predicted_bytes=None,
        )
        for kind, peak in zip(kinds, peaks, strict=True)
    ]
    return conclude(request, reports).verdict


def errors(world: int, cases: list[dict[str, Any]], megatron: list[Path]) -> list[tuple[float, int, str]]:
    """Return relative error, rank and case of every rank of every case, largest first."""
    texts = [json.dumps(case) for case in cases]
    real = run_ranks(world, WORKER, "real", world, *texts, python_path=megatron, timeout_s=1500)
    (alone,) = run_ranks(1, WORKER, "played", world, *texts, python_path=megatron, timeout_s=1500)
    found = []
    for place, (text, played) in enumerate(zip(texts, alone.result, strict=True)):
        expected = [rank.result[place] for rank in real]
        print(text, expected, played)
        assert [peak is None for peak in expected] == [peak is None for peak in played], text
        check_verdicts([peak for peak in expected if peak is not None], played)
        found += [(abs(played[rank] / peak - 1), rank, text) for rank, peak in enumerate(expected) if peak is not None]
    return sorted(found, reverse=True)


SHORT = [
    {"tp": 2, "pp": 2, "shard": True, "config": {"sequence_parallel": True}},
    {"pp": 2, "vpp": 2, "shard": True, "config": SELECTIVE},
    {
        "ep": 2,
        "tp": 2,
        "experts": 4,
        "config": {**EXPERTS, "moe_token_dispatcher_type": "alltoall", "sequence_parallel": True},
    },
    {"cp": 2, "tp": 2, "tied": True, "config": FULL},
]


FEATURES = [
    {"pp": 4, "layers": 8, "batch": 16, "shard": True, "recompute_stages": [0, 2]},
    {"pp": 2, "vpp": 2, "layers": 8, "recompute_stages": [0], "tied": True},
    {"pp": 2, "layers": 8, "tp": 2, "shard": True, "config": {"num_layers_in_first_pipeline_stage": 3}},
    {"tp": 2, "shard": True, "overlap": True, "config": {"sequence_parallel": True}},
    {"tp": 2, "pp": 2, "shard": True, "latent": True, "config": LATENT},
    {"pp": 2, "shard": True, "latent": True, "further": True, "config": LATENT},
    {"tp": 2, "latent": True, "further": True, "config": {**LATENT, **SELECTIVE}},
]


def test_a_rank_played_alone_has_the_peak_of_a_real_one() -> None:
    found = errors(4, [{"batch": 4, **case} for case in SHORT], [])
    assert len(found) == 16
    assert found[0][0] <= TOLERANCE, found[:5]


@pytest.mark.long
def test_peaks_of_features(megatron_release: list[Path]) -> None:
    found = errors(4, FEATURES, megatron_release)
    assert len(found) == 4 * 7
    assert found[0][0] <= TOLERANCE, found[:5]


@pytest.mark.long
@pytest.mark.parametrize(("world", "seed"), [(4, 1), (4, 2), (4, 3), (4, 4), (8, 5)])
def test_peaks_of_drawn_layouts(world: int, seed: int) -> None:
    source = random.Random(seed)
    found = errors(world, [draw(source, world) for _ in range(NUM_DRAWN)], [])
    assert len(found) == world * NUM_DRAWN
    assert found[0][0] <= TOLERANCE, found[:5]


@pytest.mark.long
def test_peaks_of_drawn_layouts_on_other_releases(megatron_release: list[Path]) -> None:
    source = random.Random(12)
    found = errors(4, [draw(source, 4) for _ in range(NUM_DRAWN)], megatron_release)
    assert found and found[0][0] <= TOLERANCE, found[:5]
