"""What lies where in a checkpoint, against the layout MindSpeed-MM documents."""

from __future__ import annotations

import argparse
import collections
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import TEXT, VISION, read_architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

Make = Callable[..., Path]


def layout(model: Path, text: Any = None, vision: Any = None, tp: int = 1, **more: Any) -> CheckpointLayout:
    sizes = {TEXT: tp, VISION: more.pop("vit_tp", None)}
    return make_layout(read_architecture(model), layers={TEXT: text, VISION: vision}, tensor_sizes=sizes, **more)


def converted(model: Path, target: Path, *given: Any, **more: Any) -> Path:
    conversion.huggingface_to_checkpoint(model, target, layout(model, *given, **more))
    return target


def load(folder: Path, name: str) -> Any:
    return torch.load(folder / "release" / name / "model_optim_rng.pt", weights_only=True)


def weights_of(model: Path) -> Any:
    return safetensors.load_file(model / "model.safetensors")


def test_names_of_folders_follow_tensor_and_pipeline_rank(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    folders = {path.name for path in (converted(model, tmp_path / "a", ((1, 3),), tp=2) / "release").iterdir()}
    assert folders == {"mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"}
    assert [path.name for path in (converted(model, tmp_path / "b") / "release").iterdir()] == ["mp_rank_00"]
    assert (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert load(tmp_path / "b", "mp_rank_00")["checkpoint_version"] == 3.0


def test_queries_keys_and_values_are_interleaved_by_query_group(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    state = load(converted(model, tmp_path / "mm"), "mp_rank_00")["model"]
    hf = weights_of(model)
    # 4 heads of 4 in 2 groups: 8 query rows, 4 key rows, 4 value rows, twice.
    fused = state["text_decoder.decoder.layers.2.self_attention.linear_qkv.weight"]
    part = {x: hf[f"model.layers.2.self_attn.{x}_proj.weight"] for x in "qkv"}
    expected = [part["q"][:8], part["k"][:4], part["v"][:4], part["q"][8:], part["k"][4:], part["v"][4:]]
    assert torch.equal(fused, torch.cat(expected))
    vision = state["image_encoder.encoder.blocks.layers.1.self_attention.linear_qkv.bias"]
    source = hf["visual.blocks.1.attn.qkv.bias"]
    assert torch.equal(vision[:12], torch.cat([source[0:4], source[16:20], source[32:36]]))


def test_each_tensor_rank_has_its_part_of_gate_and_of_up(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    state = load(converted(model, tmp_path / "mm", tp=2), "mp_rank_01")["model"]
    hf = weights_of(model)
    gate, up = (hf[f"model.layers.0.mlp.{name}_proj.weight"][12:] for name in ("gate", "up"))
    assert torch.equal(state["text_decoder.decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
    down = hf["model.layers.0.mlp.down_proj.weight"][:, 12:]
    assert torch.equal(state["text_decoder.decoder.layers.0.mlp.linear_fc2.weight"], down)
    assert torch.equal(
        state["image_encoder.encoder.blocks.layers.0.mlp.linear_fc2.bias"], hf["visual.blocks.0.mlp.fc2.bias"]
    )


def test_layers_count_from_zero_in_every_stage_and_ends_lie_at_the_ends(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    folder = converted(model, tmp_path / "mm", ((0, 1, 3),), ((2, 1, 0),))
    first, middle, last = (load(folder, f"mp_rank_00_00{stage}")["model"] for stage in range(3))
    hf = weights_of(model)
    assert torch.equal(
        last["text_decoder.decoder.layers.0.input_layernorm.weight"], hf["model.layers.1.input_layernorm.weight"]
    )
    assert "image_encoder.encoder.patch_embed.proj.weight" in first
    assert "image_encoder.projector.layernorm.weight" in middle
    assert "text_decoder.embedding.word_embeddings.weight" in middle
    assert not any(name.startswith("text_decoder") for name in first)
    assert "text_decoder.output_layer.weight" in last


def test_virtual_chunks_are_numbered_models(make_model: Make, tmp_path: Path) -> None:
    folder = converted(make_model(), tmp_path / "mm", ((1, 1), (1, 1)), ((3, 0), (0, 0)))
    content = load(folder, "mp_rank_00_001")
    assert {"model0", "model1"} <= content.keys()
    assert "model" not in content
    assert "text_decoder.decoder.final_layernorm.weight" in content["model1"]


def test_a_tied_output_layer_is_copied_only_to_another_stage(make_model: Make, tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    one = load(converted(model, tmp_path / "one"), "mp_rank_00")["model"]
    assert "text_decoder.output_layer.weight" not in one
    last = load(converted(model, tmp_path / "two", ((2, 2),)), "mp_rank_00_001")["model"]
    assert torch.equal(last["text_decoder.output_layer.weight"], weights_of(model)["model.embed_tokens.weight"])


def test_padding_rows_are_zero_and_dropped_on_the_way_back(make_model: Make, tmp_path: Path) -> None:
    model = make_model(vocab_size=31)
    folder = converted(model, tmp_path / "mm", tp=2, vocab_multiple=16)
    embedding = load(folder, "mp_rank_01")["model"]["text_decoder.embedding.word_embeddings.weight"]
    assert embedding.shape == (16, 16)
    assert not embedding[15:].any()


def test_hetero_encoder_is_whole_in_every_stage_and_repeats_its_shards(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    folder = converted(model, tmp_path / "mm", ((2, 2),), tp=2, vit_tp=1, hetero=True)
    states = [load(folder, f"mp_rank_0{rank}_00{stage}")["model"] for rank in range(2) for stage in range(2)]
    name = "image_encoder.encoder.blocks.layers.2.mlp.linear_fc1.weight"
    assert all(torch.equal(state[name], weights_of(model)["visual.blocks.2.mlp.fc1.weight"]) for state in states)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_checkpoint_saved_by_training_is_read_safely(make_model: Make, tmp_path: Path, protocol: int) -> None:
    model = make_model()
    folder = converted(model, tmp_path / "mm")
    path = folder / "release" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=True)
    content["args"] = argparse.Namespace(lr=1.0, nested=argparse.Namespace())
    numpy = pytest.importorskip("numpy")
    content["rng_state"] = [{"np_rng_state": numpy.random.get_state()}]
    norm = content["model"].pop("text_decoder.decoder.layers.0.input_layernorm.weight")
    content["model"]["text_decoder.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = norm
    content["model"]["text_decoder.decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    if protocol == 4:
        content["model"] = collections.defaultdict(dict, content["model"])  # as MindSpeed-LLM's converters write it
    torch.save(content, path, pickle_protocol=protocol)
    conversion.checkpoint_to_huggingface(folder, model, tmp_path / "back")
    before, after = weights_of(model), weights_of(tmp_path / "back")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


class RunsCode:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_would_run_code_is_refused_by_name(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model()
    path = converted(model, tmp_path / "mm") / "release" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"model": {}, "extra": RunsCode()}, path, pickle_protocol=protocol)
    with pytest.raises(ConfigError, match="mkdir"):
        conversion.checkpoint_to_huggingface(tmp_path / "mm", model, tmp_path / "back")
    assert not (tmp_path / "was-here").exists()
    assert not (tmp_path / "back").exists()


def test_a_torchscript_archive_is_refused_and_not_loaded(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.load passes such a file on to torch.jit.load, with any reader of its pickle."""
    model = make_model()
    path = converted(model, tmp_path / "mm") / "release" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=True), path, pickle_protocol=4)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/constants.pkl", b"")
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("torch.jit.load was called"))
    with pytest.raises(ConfigError, match="torchscript checkpoint"):
        conversion.checkpoint_to_huggingface(tmp_path / "mm", model, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_missing_rank_folder_is_named(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    folder = converted(model, tmp_path / "mm", ((2, 2),), tp=2)
    (folder / "release" / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(ConfigError, match="mp_rank_01_000"):
        conversion.resplit(folder, model, tmp_path / "b", layout(model))


def test_a_checkpoint_of_another_model_is_refused(make_model: Make, tmp_path: Path) -> None:
    folder = converted(make_model(), tmp_path / "mm")
    other = make_model("other", num_hidden_layers=5)
    with pytest.raises(ConfigError, match=r"holds 4 text layers.*has 5"):
        conversion.checkpoint_to_huggingface(folder, other, tmp_path / "back")
