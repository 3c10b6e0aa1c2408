"""What would change a model without a word is refused, in one line that names the tensor or the key."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from random_model import write_random_model
from tiny_families import tiny_config

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import architecture_from_config, read_architecture
from mindspeed_autoparallel.weights.layouts import make_layout

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

FORMATS = pytest.mark.parametrize("file_format", ("mm", "torch_dist"))


def model_of(folder: Path, family: str, **changes: Any) -> Path:
    write_random_model(folder / family, tiny_config(family, **changes))
    return folder / family


def convert(model: Path, target: Path, file_format: str = "mm", **layout: Any) -> Path:
    made = make_layout(read_architecture(model), layers={}, **{"tensor_sizes": {}, **layout})
    conversion.huggingface_to_checkpoint(model, target, made, file_format=file_format)
    return target


def edit(model: Path, change: Any) -> None:
    path = model / "model.safetensors"
    state = safetensors.load_file(path)
    change(state)
    safetensors.save_file(state, path)


def test_a_layer_without_its_biases_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen2")
    name = "model.layers.1.self_attn.k_proj.bias"
    edit(model, lambda state: state.pop(name))
    with pytest.raises(ConfigError, match=r"missing: decoder\.layers\.1\.self_attention\.linear_qkv\.bias"):
        convert(model, tmp_path / "ck")


def test_a_rank_that_lost_a_bias_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen2")
    convert(model, tmp_path / "ck")
    path = next((tmp_path / "ck").glob("release/*/*.pt"))
    state = torch.load(path, weights_only=True)
    del state["model"]["decoder.layers.2.self_attention.linear_qkv.bias"]
    torch.save(state, path)
    with pytest.raises(ConfigError, match=r"missing: decoder\.layers\.2\.self_attention\.linear_qkv\.bias"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


@FORMATS
@pytest.mark.parametrize(("written", "read"), [("qwen2", "llama"), ("qwen3", "mistral"), ("qwen2_moe", "qwen3_moe")])
def test_a_checkpoint_under_the_config_of_another_model_is_refused(
    tmp_path: Path, file_format: str, written: str, read: str
) -> None:
    convert(model_of(tmp_path, written), tmp_path / "ck", file_format)
    changes = {"mlp_only_layers": []} if read == "qwen3_moe" else {}
    other = model_of(tmp_path, read, **changes)
    with pytest.raises(ConfigError, match=r"have no place in a|are missing"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", other, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("indexed", [False, True])
def test_two_files_with_different_values_of_one_tensor_are_refused(tmp_path: Path, indexed: bool) -> None:
    model = model_of(tmp_path, "llama")
    state = safetensors.load_file(model / "model.safetensors")
    safetensors.save_file(
        {"model.norm.weight": state["model.norm.weight"] + 1, "extra": torch.ones(1)}, model / "z.safetensors"
    )
    if indexed:
        weight_map = {**dict.fromkeys(state, "model.safetensors"), "extra": "z.safetensors"}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"both hold model\.norm\.weight, with different values"):
        convert(model, tmp_path / "ck")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "uint8"])
def test_quantised_weights_without_scales_are_refused(tmp_path: Path, dtype: str) -> None:
    model = model_of(tmp_path, "llama")
    name = "model.layers.0.mlp.down_proj.weight"
    edit(model, lambda state: state.update({name: state[name].to(getattr(torch, dtype))}))
    with pytest.raises(ConfigError, match=rf"{name} is stored as {dtype}: quantised"):
        convert(model, tmp_path / "ck")


@FORMATS
def test_quantised_weights_in_a_checkpoint_are_refused(tmp_path: Path, file_format: str) -> None:
    from mindspeed_autoparallel.weights.rank_folders import RankFolderSource
    from mindspeed_autoparallel.weights.source import checked, present_entries
    from mindspeed_autoparallel.weights.torch_dist import TorchDistSource

    model = model_of(tmp_path, "llama")
    convert(model, tmp_path / "ck", file_format)
    reader = {"mm": RankFolderSource, "torch_dist": TorchDistSource}[file_format]
    source = reader(tmp_path / "ck", read_architecture(model))
    entry = present_entries(source)[-1]
    with pytest.raises(ConfigError, match=r"stored as int8: quantised"):
        checked(entry, source.load(entry).to(torch.int8), "ck")
    if isinstance(source, RankFolderSource):
        path = next((tmp_path / "ck").glob("release/*/*.pt"))
        state = torch.load(path, weights_only=True)
        state["model"] = {name: tensor.to(torch.int8) for name, tensor in state["model"].items()}
        torch.save(state, path)
        with pytest.raises(ConfigError, match=r"stored as int8: quantised"):
            conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


def test_norms_that_differ_between_tensor_ranks_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, "llama")
    convert(model, tmp_path / "ck", tensor_sizes={"text": 2})
    path = tmp_path / "ck" / "release" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["decoder.layers.3.input_layernorm.weight"][0] += 1
    torch.save(state, path)
    with pytest.raises(
        ConfigError, match=r"layers\.3\.input_layernorm\.weight differs between tensor rank 0 and rank 1"
    ):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


@FORMATS
def test_a_nan_in_a_tied_embedding_is_refused_in_both_directions(tmp_path: Path, file_format: str) -> None:
    model = model_of(tmp_path, "llama", tie_word_embeddings=True)
    convert(model, tmp_path / "ck", file_format)
    edit(model, lambda state: state["model.embed_tokens.weight"][3].fill_(float("nan")))
    with pytest.raises(ConfigError, match=r"word_embeddings\.weight holds values that are not finite"):
        convert(model, tmp_path / "other", file_format)
    path = next((tmp_path / "ck").rglob("*.pt" if file_format == "mm" else "*.distcp"))
    whole = safetensors.load_file(model / "model.safetensors")["model.embed_tokens.weight"].clone()
    data = path.read_bytes()
    whole[3] = 0
    model_again = tmp_path / "again"
    write_random_model(model_again, tiny_config("llama", tie_word_embeddings=True))
    row = safetensors.load_file(model_again / "model.safetensors")["model.embed_tokens.weight"][3].numpy().tobytes()
    assert data.count(row) == 1
    path.write_bytes(data.replace(row, torch.full((32,), float("nan")).numpy().tobytes()))
    with pytest.raises(ConfigError, match=r"not finite|cannot read"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model_again, tmp_path / "back")


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_positions_are_reported_with_the_flags_of_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, key: str
) -> None:
    model = model_of(tmp_path, "llama", **{key: {"rope_type": kind, "factor": 8.0, "rope_theta": 1e4}})
    with caplog.at_level(logging.WARNING):
        convert(model, tmp_path / "ck")
    assert f"scales positions ({kind})" in caplog.text and "--" in caplog.text


def test_positions_of_one_kind_of_layer_count_too() -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    config = tiny_config("gemma3_text", rope_parameters=parameters)
    assert architecture_from_config(config, "config.json").rope_scaling == "linear"


def test_a_copy_of_the_embedding_for_further_tokens_must_equal_it(tmp_path: Path) -> None:
    model = model_of(tmp_path, "deepseek_v3")
    copy = "model.layers.4.embed_tokens.weight"
    edit(model, lambda state: state.update({copy: state["model.embed_tokens.weight"].clone()}))
    convert(model, tmp_path / "ck")
    conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")
    assert copy in safetensors.load_file(tmp_path / "back" / "model.safetensors")
    edit(model, lambda state: state[copy].add_(1))
    with pytest.raises(ConfigError, match=rf"{copy} differs from model\.embed_tokens\.weight"):
        convert(model, tmp_path / "other")


def test_the_original_is_opened_once_however_many_norms_are_stored_around_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspeed_autoparallel.weights.safetensors_file import SafetensorsFile

    model = model_of(tmp_path, "qwen3_next")
    convert(model, tmp_path / "ck")
    opened: list[Path] = []
    read_header = SafetensorsFile._read_header

    def counted(file: SafetensorsFile, stream: Any) -> Any:
        opened.append(file.path)
        return read_header(file, stream)

    monkeypatch.setattr(SafetensorsFile, "_read_header", counted)
    conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")
    # Once for the forms of its experts, once for its names, types and untrained parts.
    assert opened == [model / "model.safetensors"] * 2
