"""Converted language models of every family give in Megatron's GPTModel the logits that transformers gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_families import COMPOSITE, FAMILIES, TEXT, tiny_config, tiny_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.usefixtures("one_process")]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"tie_word_embeddings": True, "attention_bias": False, "rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("qwen3_moe", {"tie_word_embeddings": True, "norm_topk_prob": True}),
    ("deepseek_v3", {"first_k_dense_replace": 0}),
]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_gpt_model_equals_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from megatron_families import LENGTH, gpt_model, load, logits

    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    if family == "llama4_text":
        changes = {**changes, "attn_temperature_tuning": False}  # Megatron has none
    theirs = tiny_model(family, **changes)
    theirs.save_pretrained(tmp_path / "hf")
    if family == "kimi_k2":
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": family}))
    architecture = read_architecture(tmp_path / "hf")
    layout = make_layout(architecture, layers={}, tensor_sizes={})
    conversion.huggingface_to_checkpoint(tmp_path / "hf", tmp_path / "mm", layout)
    path = tmp_path / "mm" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=True)["model"]
    text = COMPOSITE[family][0] if family in COMPOSITE else family
    if family not in TEXT:
        prefix = "text_decoder."
        state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    config = theirs.config.get_text_config()
    ours = gpt_model(text, config, architecture.tied_embeddings)
    load(text, ours, state)
    ids = torch.randint(3, 60, (2, LENGTH))
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        found = logits(text, config, ours, ids)
    assert found.shape == expected.shape
    assert expected.std() > 1e-3
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max())

    check_torch_dist(tmp_path, layout, ours, state, "" if family in TEXT else "text_decoder.")
    conversion.checkpoint_to_huggingface(tmp_path / "mm", tmp_path / "hf", tmp_path / "back")
    before, after = (safetensors.load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def check_torch_dist(folder: Path, layout: Any, model: Any, expected: dict[str, Any], prefix: str) -> None:
    """Megatron's own loader finds every tensor of its model in our torch_dist, to the bit those of the rank folders."""
    from megatron.core import dist_checkpointing

    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.spelling import EACH, LOCAL, STACKED, Spelling

    layers = EACH if isinstance(model.config.moe_layer_freq, list) else STACKED
    kind = {"file_format": "torch_dist", "spelling": Spelling(LOCAL, layers=layers)}
    conversion.huggingface_to_checkpoint(folder / "hf", folder / "dist", layout, **kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    found = dist_checkpointing.load(model.sharded_state_dict(prefix=prefix), str(folder / "dist" / "release"))
    assert {name: torch.equal(found[prefix + name], tensor) for name, tensor in expected.items()} == dict.fromkeys(
        expected, True
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_equals_a_layer_of_transformers_behind_its_norms(family: str, tmp_path: Path) -> None:
    import transformers
    from megatron_families import LENGTH, gpt_model, logits
    from random_model import write_random_model

    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    config = tiny_config(family)
    write_random_model(tmp_path / "hf", config, scale=0.1)
    layout = make_layout(read_architecture(tmp_path / "hf"), layers={}, tensor_sizes={})
    conversion.huggingface_to_checkpoint(tmp_path / "hf", tmp_path / "mm", layout)
    path = tmp_path / "mm" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=True)["model"]
    config_class, model_class = (getattr(transformers, name) for name in TEXT[family][-2:])
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    ours = gpt_model(family, config_class(**sizes), False, multi_token=1)
    # Megatron has another name for the layer since 0.18; in its distributed checkpoints it kept the old one.
    renamed = {name.replace(".transformer_layer.", ".mtp_model_layer."): tensor for name, tensor in state.items()}
    ours.load_state_dict(renamed, strict=True)
    found: dict[str, Any] = {}
    ours.mtp.layers[0].register_forward_hook(
        lambda module, inputs, given, output: found.update(given, output=output[0]), with_kwargs=True
    )
    # Transformers drops the layer; as the fifth of a model of five layers it is an ordinary one.
    number = config["num_hidden_layers"]
    (tmp_path / "five").mkdir()
    shutil.copy(tmp_path / "hf" / "model.safetensors", tmp_path / "five")
    (tmp_path / "five" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": number + 1}))
    theirs = model_class.from_pretrained(tmp_path / "five", attn_implementation="eager").eval()
    own = safetensors.load_file(tmp_path / "hf" / "model.safetensors")

    def normed(rows: Any, name: str) -> Any:
        weight = own[f"model.layers.{number}.{name}.weight"]
        return torch.nn.functional.rms_norm(rows, weight.shape, weight, theirs.config.rms_norm_eps)

    ids = torch.randint(3, 60, (2, LENGTH))
    following = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), dim=1)
    with torch.no_grad():
        logits(family, theirs.config, ours, ids)
        both = (normed(theirs.model.embed_tokens(following), "enorm"), normed(found["hidden_states"], "hnorm"))
        rows = torch.nn.functional.linear(
            torch.cat((both[0], both[1].transpose(0, 1)), dim=-1), own[f"model.layers.{number}.eh_proj.weight"]
        )
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
        turns = theirs.model.rotary_emb(rows, torch.arange(LENGTH)[None])
        rows = theirs.model.layers[number](rows, attention_mask=mask, position_embeddings=turns)
        expected = theirs.lm_head(normed(rows, "shared_head.norm"))
        predicted = ours.output_layer(found["output"])[0].transpose(0, 1)
    assert expected.std() > 1e-3
    assert (predicted - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max())
    check_torch_dist(tmp_path, layout, ours, renamed, "")
