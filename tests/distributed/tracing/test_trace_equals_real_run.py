"""A trace on one process against the same code on real gloo ranks: bytes and collectives must be equal."""

import dataclasses
import json
from typing import Any

import pytest
from ranks import run_ranks

pytest.importorskip("megatron.core")

from mindspeed_autoparallel.runtime.profiling.trace.process import trace_all
from mindspeed_autoparallel.runtime.profiling.trace.request import TraceRequest

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.usefixtures("forked_starts"),
]

_BASE = TraceRequest(
    hidden=64, heads=4, sequence=32, micro_batch=2, ffn=128, gated=True, dtype="float32", vocabulary=256
)
_EXPERTS = dataclasses.replace(_BASE, num_experts=4, topk=2, expert_ffn=96)
_STAGE = dataclasses.replace(_BASE, block="stage", pipeline=2, num_layers=4, num_microbatches=4)


def _with(base: TraceRequest, **changes: Any) -> TraceRequest:
    return dataclasses.replace(base, **changes)


_TWO_RANKS = {
    "tensor": _with(_BASE, tensor=2),
    "sequence parallel": _with(_BASE, tensor=2, sequence_parallel=True),
    "sequence parallel, selective recompute": _with(_BASE, tensor=2, sequence_parallel=True, recompute="selective"),
    "sequence parallel, full recompute": _with(_BASE, tensor=2, sequence_parallel=True, recompute="full"),
    "norms and MLP recomputed": _with(
        _BASE, tensor=2, sequence_parallel=True, recompute="selective:core_attn,layernorm,mlp"
    ),
    "experts, norms recomputed": _with(_EXPERTS, expert=2, recompute="selective:layernorm"),
    "experts and attention recomputed": _with(_EXPERTS, expert=2, recompute="selective:core_attn,moe"),
    "shared experts recomputed": _with(_EXPERTS, expert=2, shared_ffn=64, recompute="selective:shared_experts"),
    "experts, gathered tokens": _with(_EXPERTS, expert=2, dispatcher="allgather"),
    "grouped queries, plain MLP": _with(_BASE, tensor=2, kv_heads=2, gated=False),
    "context": _with(_BASE, context=2),
    "context, rows exchanged for heads": _with(_BASE, context=2, context_exchange="a2a"),
    "context, full recompute": _with(_BASE, context=2, recompute="full"),
    "experts": _with(_EXPERTS, expert=2),
    "experts, full recompute": _with(_EXPERTS, expert=2, recompute="full"),
    "experts split by tensor ranks, shared expert": _with(_EXPERTS, tensor=2, sequence_parallel=True, shared_ffn=64),
    "whole experts on tensor ranks": _with(_EXPERTS, tensor=2, expert=2, expert_tensor=1, sequence_parallel=True),
    "embedding": _with(_BASE, block="embedding", tensor=2, sequence_parallel=True),
    "head": _with(_BASE, block="head", tensor=2, sequence_parallel=True),
    "first stage": _STAGE,
    "last stage": _with(_STAGE, stage=1),
    "first stage, full recompute": _with(_STAGE, recompute="full"),
    "first stage, groups of layers recomputed": _with(_STAGE, num_layers=6, recompute="full:2"),
    "first stage, interleaved": _with(_STAGE, virtual=2),
    "last stage, interleaved": _with(_STAGE, virtual=2, stage=1),
    "first stage, experts": _with(_STAGE, num_experts=4),
}
_FOUR_RANKS = {
    "tensor, sequence and context": _with(_BASE, tensor=2, context=2, sequence_parallel=True),
    "experts over tensor and data": _with(_EXPERTS, tensor=2, expert=2, sequence_parallel=True),
    "last stage, sequence parallel, full recompute": _with(
        _STAGE, tensor=2, sequence_parallel=True, recompute="full", stage=1
    ),
    "first stage, interleaved, context": _with(_STAGE, virtual=2, context=2),
    "first of four stages": _with(_STAGE, pipeline=4),
}


def _real(requests: list[TraceRequest]) -> list[dict[str, Any]]:
    """The same requests on as many real processes as the first one's world has; of each, what its rank found."""
    program = "import gc, sys; gc.set_threshold(700, 10, 10); from mindspeed_autoparallel.runtime.profiling.trace.__main__ import main; sys.exit(main())"
    asked = json.dumps([dataclasses.asdict(request) for request in requests])
    ranks = run_ranks(requests[0].num_ranks, program, "gloo", stdin=asked, timeout_s=400)
    lines = [line for rank in ranks for line in rank.stdout.splitlines() if line.startswith("TRACE ")]
    found = {result.pop("index"): result for result in (json.loads(line[len("TRACE ") :]) for line in lines)}
    return [found[index] for index in range(len(requests))]


@pytest.fixture(scope="module", params=[_TWO_RANKS, _FOUR_RANKS], ids=["two ranks", "four ranks"])
def pairs(request: pytest.FixtureRequest) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    requests = list(request.param.values())
    traced, real = trace_all(requests), _real(requests)
    return dict(zip(request.param, zip(traced, real, strict=True), strict=True))


def test_every_layout_was_traced(pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    assert {name: traced["error"] for name, (traced, _) in pairs.items() if "error" in traced} == {}


def test_parameters_and_saved_bytes_are_those_of_real_ranks(
    pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    for name, (traced, real) in pairs.items():
        assert traced["parameter_count"] == real["parameter_count"], name
        assert traced.get("saved_bytes") == real.get("saved_bytes"), name


def test_collectives_are_those_of_real_ranks(pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for name, (traced, real) in pairs.items():
        for phase in {"forward", "backward", "step"} & set(real):
            assert traced[phase]["collectives"] == real[phase]["collectives"], (name, phase)
    assert any(real.get("step", real.get("forward"))["collectives"] for _, real in pairs.values())


def test_live_and_peak_bytes_are_those_of_real_ranks(pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for name, (traced, real) in pairs.items():
        for phase in {"forward", "backward", "step"} & set(real):
            assert traced[phase]["live_bytes"] == real[phase]["live_bytes"], (name, phase)
            assert traced[phase]["peak_bytes"] == real[phase]["peak_bytes"], (name, phase)
