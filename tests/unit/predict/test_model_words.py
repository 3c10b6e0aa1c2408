"""A model's sizes in the words its owner has them in; transformers' own parameter counts are the oracle."""

import json
from pathlib import Path

import pytest
from exit_codes import exit_code

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.analytic.parameters import stage_parameters
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.model_file import in_request_words
from mindspeed_autoparallel.predict.predict import predict_one

_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 12800,
}
_ROUTED = {"num_experts_per_tok": 4, "moe_intermediate_size": 256}
_DENSE_FIRST = {**_ROUTED, "n_routed_experts": 16, "n_shared_experts": 2, "first_k_dense_replace": 2}
_LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_FAMILIES = {
    "llama": {},
    "mistral": {"head_dim": 96},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {**_ROUTED, "num_experts": 16, "shared_expert_intermediate_size": 1024},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {**_ROUTED, "num_experts": 16, "head_dim": 128},
    "gpt_oss": {"intermediate_size": 256, "num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64},
    "glm4_moe": {**_DENSE_FIRST, "head_dim": 128},
    "deepseek_v2": {**_DENSE_FIRST, **_LATENT, "q_lora_rank": None},
    "deepseek_v3": {**_DENSE_FIRST, **_LATENT, "q_lora_rank": 192, "n_group": 4, "topk_group": 2},
}
_REST = {"hw": {"gpu": "H100", "num_gpus": 8, "gpus_per_node": 8}, "parallel": {}, "train": {"gbs": 8, "mbs": 1}}
_MEGATRON = {
    "--num-layers": 24,
    "hidden-size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "ffn_hidden_size": 5632,
    "seq_length": 4096,
    "padded_vocab_size": 32000,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}
_OWN = {
    "type": "gpt",
    "num_layers": 24,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 4,
    "ffn": 5632,
    "seq": 4096,
    "vocab": 32000,
    "swiglu": True,
    "tied_embeddings": False,
}


@pytest.mark.slow  # where it is the first to import transformers
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_config_json_has_as_many_parameters_as_the_model_that_transformers_builds(family: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **{**_SIZES, **_FAMILIES[family]})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # transformers leaves layers of multi-token prediction out.
    published = {**json.loads(config.to_json_string(use_diff=False)), "num_nextn_predict_layers": 0, "seq": 4096}
    work = read_workload({**_REST, "model": in_request_words(published, "config.json")})
    counted = stage_parameters(work, 0)
    # Norms of queries and keys, and biases of a few projections, are not counted.
    assert counted.shared + counted.expert == pytest.approx(model.num_parameters(), rel=2e-3)


def test_published_names_of_expert_counts_are_read_too() -> None:
    published = {**_SIZES, **_ROUTED, "model_type": "qwen3_moe", "num_experts": 16}
    assert in_request_words(published, "config.json")["num_experts"] == 16


def test_megatrons_names_and_a_requests_are_one_model() -> None:
    named = predict_one({**_REST, "model": _MEGATRON})
    assert named["status"] == "ok", named
    assert named == predict_one({**_REST, "model": _OWN})


def test_every_expert_layer_and_prediction_layer_of_a_config_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**_SIZES, **_DENSE_FIRST, **_LATENT, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = ["plan", "--profile-source", "analytic", "--model", str(path), "--device", "H100", "--nnodes", "1"]
    words += ["--nproc-per-node", "8", "--global-batch-size", "32"]
    assert main(words) == 2
    assert "has no sequence length; give --seq-length" in capsys.readouterr().err
    assert main([*words, "--seq-length", "2048", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"]["sequence_length"] == 2048
    assert plan["model"]["modules"][0]["num_layers"] == 6


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**_SIZES, "model_type": "t5"}, "model_type t5 is not known; known: deepseek_v2"),
        ({**_SIZES}, "model_type None is not known"),
        ({"model_type": "qwen2_vl", "vision_config": {}, **_SIZES}, "vision_config.embed_dim is missing"),
        ({**_SIZES, "model_type": "llama", "hidden_size": "wide"}, "config.json.hidden_size is 'wide'"),
        ({**_SIZES, "model_type": "qwen3_moe"}, "config.json.num_experts is missing"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_with_the_key(config: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        in_request_words(config, "config.json")
    assert words in str(refused.value)


@pytest.mark.parametrize("length", ["0", "-5"])
def test_a_sequence_length_must_be_positive(tmp_path: Path, capsys: pytest.CaptureFixture[str], length: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(_OWN))
    words = ["plan", "--profile-source", "analytic", "--model", str(path), "--device", "H100", "--nnodes", "1"]
    assert exit_code([*words, "--nproc-per-node", "8", "--global-batch-size", "32", "--seq-length", length]) == 2
    assert f"--seq-length: must be a whole number of at least 1, got '{length}'" in capsys.readouterr().err
