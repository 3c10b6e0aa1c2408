"""A request in other words is the same request: names of keys, spellings of values, what a layout or a source implies."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN, unknown_keys
from mindspeed_autoparallel.cost.analytic.spellings import ALIASES, canonical, container_of
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.model_file import request_in_own_words
from mindspeed_autoparallel.predict.predict import predict_one

_LATENT = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
_REQUEST: dict[str, Any] = {
    "model": {
        "num_layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 4, "head_size": 192, "ffn": 6144, "seq": 4096,
        "vocab": 32000, "swiglu": True, "tied_embeddings": False, "num_experts": 16, "topk": 4, "moe_ffn": 1024,
        "shared_expert_ffn": 2048, "num_dense_layers": 2, "window": 512, "mla": _LATENT,
    },
    "hw": {"gpu": "GB200", "num_gpus": 64, "gpus_per_node": 4},
    "parallel": {"tp": 2, "pp": 2, "vpp": 2, "cp": 2, "dp": 8, "ep": 8, "etp": 1, "sp": True, "dist_opt": True},
    "train": {"gbs": 256, "mbs": 1, "recompute": "selective", "moe_a2a_overlap": True, "precision": "mxfp8"},
}  # fmt: skip


def _work(request: dict[str, Any]) -> Workload:
    return read_workload(request_in_own_words(request))


def _with(**changes: dict[str, Any]) -> dict[str, Any]:
    request = copy.deepcopy(_REQUEST)
    for section, values in changes.items():
        request[section].update(values)
    return request


def test_drawn_names_of_keys_describe_the_same_run() -> None:
    rng = random.Random(29)
    expected = _work(_REQUEST)
    seen = set()
    for _ in range(60):
        request: dict[str, Any] = {}
        for section, values in _REQUEST.items():
            names = {key: [key, *(other for other, own in ALIASES[section].items() if own == key)] for key in values}
            renamed = {rng.choice(names[key]): value for key, value in values.items()}
            seen |= renamed.keys()
            request[section] = dict(rng.sample(sorted(renamed.items(), key=lambda item: item[0]), len(renamed)))
        assert _work(request) == expected, request
        assert unknown_keys(request_in_own_words(request)) == []
    assert {"hidden_size", "vp", "world_size", "overlap_moe_expert_parallel_comm"} <= seen


def test_every_alias_names_a_known_key_and_is_not_one_itself() -> None:
    for section, names in ALIASES.items():
        assert set(names.values()) <= KNOWN[section]
        assert not set(names) & KNOWN[section]


def test_two_names_of_one_key_must_agree() -> None:
    assert _work(_with(parallel={"tensor_model_parallel_size": 2})) == _work(_REQUEST)
    with pytest.raises(ConfigError, match=r"parallel.tp is 2 and parallel.tensor_model_parallel_size is 4"):
        canonical(_with(parallel={"tensor_model_parallel_size": 4}))
    assert canonical(_with(parallel={"vp": None}))["parallel"]["vpp"] == 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("recipe", "spellings"),
    [
        ("bf16", ["BF16", "bf16-mixed", "bf16_mixed"]),
        ("fp8", ["FP8", "fp8_cs", "FP8-CS", "fp8_hybrid", "bf16_with_fp8_current_scaling_mixed", "fp8_per_tensor"]),
        ("fp8_blockwise", ["fp8_sc", "FP8 blockwise", "bf16_with_fp8_subchannel_scaling_mixed"]),
        ("mxfp8", ["MXFP8", "fp8_mx", "FP8-MX", "bf16_with_mxfp8_mixed"]),
        ("nvfp4", ["NVFP4", "nv-fp4", "bf16_with_nvfp4_mixed"]),
    ],
)
def test_a_precision_is_read_in_the_words_of_recipes(recipe: str, spellings: list[str]) -> None:
    expected = _work(_with(train={"precision": recipe}))
    for written in spellings:
        assert _work(_with(train={"precision": written})) == expected, written
    if recipe in ("fp8", "mxfp8", "fp8_blockwise"):
        name = {"fp8": "tensorwise", "fp8_blockwise": "blockwise"}.get(recipe, recipe)
        assert _work(_with(train={"precision": "fp8", "fp8_recipe": name})) == expected
    with pytest.raises(ConfigError, match=r"train.precision is 'fp7'"):
        _work(_with(train={"precision": "fp7"}))


def test_a_layout_string_counts_its_chunks_and_predicted_tokens() -> None:
    layout = {"pipeline_layout": "Et*4|t*4|t*4|t*4mL"}
    stated = _work(_with(model={"mtp_layers": 1}, parallel={**layout, "vpp": 2}))
    assert _work(_with(parallel={**layout, "vpp": None})) == stated
    assert stated.virtual_size == 2
    assert stated.model.mtp_layers == 1
    with pytest.raises(ConfigError, match="has 1 MTP layers"):
        _work(_with(model={"mtp_layers": 0}, parallel=layout))


def test_a_tray_of_a_rack_has_four_devices_and_zero_switches_off() -> None:
    assert _work(_with(hw={"gpus_per_node": None})) == _work(_REQUEST)
    off = _work(_with(parallel={"vpp": 0, "fsdp": 0}, train={"recompute": "None"}))
    assert (off.virtual_size, off.sharding, off.recompute) == (1, "", "none")
    assert _work(_with(parallel={"fsdp": False})) == _work(_REQUEST)


@pytest.mark.parametrize(
    ("source", "software"),
    [
        ("perf summary, 26.02.01 NeMo Container", "nemo-26.02"),
        ("NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md 25.11 DGX-GB300", "nemo-25.11"),
        ("NVIDIA/NeMo@8e3d65dcfe performance_summary.md (24.07)", "nemo-24.07"),
        ("Ascend/MindSpeed-LLM@26.1.0 README.md", None),
        ("pytorch 25.04", None),
        ("NeMo run of 2025.04.12", None),
    ],
)
def test_a_source_names_the_container_where_the_request_does_not(source: str, software: str | None) -> None:
    assert container_of(source) == software
    request = {**_REQUEST, "source": source}
    assert _work(request) == _work(_with(train={"software": software}))
    stated = _with(train={"software": "nemo-25.11"})
    assert _work({**stated, "source": source}) == _work(stated)


def test_keys_beside_the_sections_are_named_unless_they_are_information() -> None:
    answer = predict_one({**_REQUEST, "measured": {"iter_time_ms": 3}, "family": "MoE", "paralel": {}})
    assert "paralel: unknown; ignored" in answer["notes"]
    megatron = {"hidden_size": 2048, "num_attention_heads": 16, "num_layers": 16, "seq_length": 4096, "misspelt": 1}
    answer = predict_one({**_REQUEST, "model": {**megatron, "mla": _LATENT}, "parallel": {}})
    assert "model.misspelt: unknown; ignored" in answer["notes"]


def test_exchanges_are_not_hidden_where_megatron_refuses_the_switch() -> None:
    one_chunk = _with(parallel={"vpp": 1})
    answer = predict_one(one_chunk)
    assert any(note.startswith("train.moe_a2a_overlap: no effect here, Megatron takes it") for note in answer["notes"])
    off = copy.deepcopy(one_chunk)
    off["train"]["moe_a2a_overlap"] = False
    assert predict_one(off)["step_time_ms"] == answer["step_time_ms"]
