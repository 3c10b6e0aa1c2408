"""Optimizer state under any two layouts of Megatron's fully reshardable checkpoints: to the bit, and training goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]
pytest.importorskip("megatron.core")
EXPERTS = {"experts": 4, "config": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}}
EXPERTS["config"] |= {"moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "alltoall"}
KINDS: list[dict[str, Any]] = [
    {"shard": True},
    {"shard": True, "tied": True},
    {"shard": True, "bf16": True},
    {},
    {"bf16": True},
    {"shard": True, **EXPERTS},
]
ACROSS: list[dict[str, Any]] = [{"shard": True}, {}, {"bf16": True}, {"shard": True, "bf16": True}]
"""Optimizers whose state moves between EP 1 and EP above 1, both ways."""
DENSE: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"pp": 2, "vpp": 2},
    {"tp": 2, "pp": 2, "vpp": 2},
]
# Megatron has an optimizer of its own for experts where EP is above 1: pairs with and without it are drawn.
SPARSE: list[dict[str, Any]] = [{}, {"pp": 2}, {"pp": 4}, {"ep": 2}, {"ep": 4}, {"ep": 2, "pp": 2}]


def drawn(count: int, seed: int, steps: int) -> list[list[Any]]:
    """Pairs of two different layouts of one kind of model and optimizer."""
    generator = random.Random(seed)
    pairs = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        before, after = generator.sample(SPARSE if "experts" in kind else DENSE, 2)
        pairs.append([{**kind, **before}, {**kind, **after}, 0 if kind.get("bf16") else steps])
    return pairs


@pytest.mark.parametrize(
    ("count", "seed"), [(6, 0), *(pytest.param(12, seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_state_moves_to_the_bit_and_training_goes_on(count: int, seed: int) -> None:
    check(drawn(count, seed, 10 if seed else 3))


@pytest.mark.parametrize("kinds", [ACROSS[:1], pytest.param(ACROSS[1:], marks=pytest.mark.long)])
def test_state_of_experts_moves_between_one_optimizer_and_two(kinds: list[dict[str, Any]]) -> None:
    pairs = []
    for kind in kinds:
        one, two = {**EXPERTS, **kind, "pp": 2}, {**EXPERTS, **kind, "ep": 2}
        steps = 0 if kind.get("bf16") else 3
        pairs += [[one, two, steps], [two, one, steps]]
    check(pairs)


def check(pairs: list[list[Any]]) -> None:
    program = Path(__file__).with_name("state_pairs.py")
    results = run_ranks(4, program, json.dumps(pairs), timeout_s=800)[0].result
    for (before, after, steps), found in zip(pairs, results, strict=True):
        assert found["different"] == [] and found["moments"] > 10, (before, after, found["different"])
        uninterrupted, resumed = found["losses"]
        assert len(resumed) == steps
        assert resumed == pytest.approx(uninterrupted, rel=1e-6), (before, after)
