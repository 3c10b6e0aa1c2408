"""The figures of an answer, by hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from example_plan import example_plan
from hugging_face_configs import QWEN3_30B_A3B

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile
from mindspeed_autoparallel.predict.hugging_face import decoder_of_config
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.report.answer import amount, answer_lines, answer_of
from mindspeed_autoparallel.spec import Model
from mindspeed_autoparallel.spec.plan_records import Baseline, PlannedFrom

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def _model(config: dict[str, object], sequence: int) -> Model:
    shape = {**decoder_of_config(config, "config"), "seq": sequence}
    profile = analytic_profile([Section("text_decoder", shape)], find_device("H100"), 8, points=[MeasuredAt()])
    return profile.model


def test_operations_of_a_dense_model_are_six_per_parameter_and_token_and_causal_attention() -> None:
    model = _model(LLAMA, 8192)
    per_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    attention = 32 * 2 * 8192 * 8192 * 4096  # both products of all tokens, half of them masked
    expected = 6 * 8192 * (32 * per_layer + 128256 * 4096) + 3 * attention
    assert model.operations_per_sample == pytest.approx(expected, rel=1e-3)
    assert model.num_active_parameters == model.num_parameters == pytest.approx(8.03e9, rel=2e-3)


@pytest.mark.parametrize(("config", "billions"), [(QWEN3_30B_A3B, 3.35), (DEEPSEEK, 37.5)])
def test_active_parameters_of_experts_are_those_that_were_published(config: dict[str, object], billions: float) -> None:
    """3.3 billion of Qwen3-30B-A3B, 37 of DeepSeek-V3, by their model cards, to the digits given there."""
    assert _model(config, 4096).num_active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_figures_of_the_answer_follow_from_the_plan() -> None:
    plan = example_plan()
    device = {"memory_capacity_bytes": 64 * 2**30, "peak_flops_per_s": 1e15}
    operations = 0.4 * 1e15 * plan.cluster.num_devices * plan.step.total_us / 1e6 / plan.global_batch_size
    plain = Baseline(
        name="plain", step_us=1.25 * plan.step.total_us, feasible=True, layers={}, recompute={}, layout=plan.layout
    )
    plan = replace(
        plan,
        model=replace(plan.model, operations_per_sample=operations),
        extra=PlannedFrom(costs={"device": device}),
        baselines=(*plan.baselines, plain),
    )
    answer = answer_of(plan)
    assert answer.mfu == pytest.approx(0.4)
    assert answer.plain_loss == pytest.approx(0.25)
    assert answer.tokens_per_s == pytest.approx(plan.throughput_tokens_per_s_per_device * plan.cluster.num_devices)
    assert answer.days(answer.tokens_per_s * 86_400) == pytest.approx(1.0)
    lines = "\n".join(answer_lines(plan, 1e12))
    for words in ("MFU 40.0%", "1T tokens take", "free, plus a margin of", "(+25.0%) by the best plain recipe"):
        assert words in lines


def test_amounts_of_tokens_are_short() -> None:
    assert [amount(number) for number in (1e12, 3e11, 2.5e6, 1.5e13, 12)] == ["1T", "300B", "2.5M", "15T", "12"]
