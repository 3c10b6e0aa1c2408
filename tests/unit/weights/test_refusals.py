"""Weights that would be wrong or lost without a word, and folders that are not ours to replace, are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_plan import example_plan

from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import TEXT, architecture_from_config, read_architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout
from mindspeed_autoparallel.weights.plan_layout import layout_from_plan
from mindspeed_autoparallel.weights.safetensors_file import SafetensorsFile

Make = Callable[..., Path]
torch = pytest.importorskip("torch")
SINGLE = "model.safetensors"


def plain(model: Path, **sizes: int) -> CheckpointLayout:
    return make_layout(read_architecture(model), layers={}, tensor_sizes={TEXT: sizes.get("tp", 1)})


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensor(model: Path, name: str, change: Callable[[Any], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / SINGLE)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, model / SINGLE)


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("rows", [29, 31, 60])
def test_an_embedding_of_another_vocabulary_is_neither_cut_nor_padded(make_model: Make, tmp_path: Path, rows: int):
    model = make_model()
    change_tensor(model, EMBEDDING, lambda old: torch.ones(rows, old.shape[1]))
    with pytest.raises(
        ConfigError, match=rf"embed_tokens.weight has the shape \[{rows}, 16\]; config.json implies \[30, 16\]"
    ):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.down_proj.weight", "visual.patch_embed.proj.weight", "model.norm.weight"]
)
def test_tensors_of_another_width_are_named(make_model: Make, tmp_path: Path, name: str):
    model = make_model()
    change_tensor(model, name, lambda old: torch.ones(*old.shape[:-1], old.shape[-1] + 1))
    with pytest.raises(ConfigError, match=rf"{name} has the shape .*belong to different models"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))


def test_a_tied_config_beside_an_output_layer_of_its_own_is_refused(make_model: Make, tmp_path: Path):
    model = make_model()
    change_config(model, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from the embedding"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    from safetensors.torch import load_file

    embedding = load_file(model / SINGLE)[EMBEDDING]
    change_tensor(model, "lm_head.weight", lambda old: embedding.clone())
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))


def test_a_checkpoint_trained_untied_does_not_become_a_tied_model(make_model: Make, tmp_path: Path):
    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    change_config(model, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="trained untied"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


@pytest.mark.parametrize("file_format", ["mm", "torch_dist"])
def test_a_checkpoint_of_another_vocabulary_is_refused_and_padding_is_reported(
    make_model: Make, tmp_path: Path, file_format: str, caplog: pytest.LogCaptureFixture
):
    model = make_model()
    layout = make_layout(read_architecture(model), layers={}, tensor_sizes={}, vocab_multiple=64)
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", layout, file_format=file_format)
    assert "34 rows of zeros pad the vocabulary of 30" in caplog.text
    conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")
    assert "34 padding rows" in caplog.text
    change_config(model, vocab_size=65)
    with pytest.raises(ConfigError, match=r"has the shape \[64, 16\]; config.json implies \[65, 16\]"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "other")


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "huge": lambda header: header[EMBEDDING].update(shape=[2**40, 2**20]),
    "negative": lambda header: header[EMBEDDING].update(data_offsets=[-4, 8]),
    "overlap": lambda header: header[EMBEDDING].update(data_offsets=header["model.norm.weight"]["data_offsets"]),
    "swapped": lambda header: header[EMBEDDING].update(data_offsets=header[EMBEDDING]["data_offsets"][::-1]),
    "no shape": lambda header: header[EMBEDDING].pop("shape"),
    "kind": lambda header: header.update({EMBEDDING: [1]}),
    "dtype": lambda header: header[EMBEDDING].update(dtype=["F32"]),
    "fractions": lambda header: header[EMBEDDING].update(shape=[7.5, 64]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_corrupt_before_memory_is_taken(make_model: Make, lie: str):
    model = make_model()
    change_header(model / SINGLE, LIES[lie])
    with pytest.raises(ConfigError, match="is corrupt"):
        SafetensorsFile(model / SINGLE)


@pytest.mark.parametrize("text", ["4,4,0", "0,4,4", "[[8,0],[0,0]]"])
def test_a_dense_model_is_not_given_an_empty_end(text: str):
    from mindspeed_autoparallel.weights.layouts import parse_layers

    config = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 30,
    }
    with pytest.raises(ConfigError, match="Give both at least one layer"):
        make_layout(
            architecture_from_config(config, "c"), layers={TEXT: parse_layers(text, "--llm-pp-layers")}, tensor_sizes={}
        )


def omni() -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_omni",
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 4, "intermediate_size": 24, "patch_size": 2},
        "audio_config": {"encoder_layers": 1, "d_model": 8, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    }


def test_omni_trained_without_its_audio_tokens_goes_back_with_those_of_the_original(make_model: Make, tmp_path: Path):
    """The reference model has no such parameter."""
    from safetensors.torch import load_file

    model = make_model(**omni())
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    path = tmp_path / "ck" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=True)
    del state["model"]["audio_encoder.encoder.audio_bos_eos_token.weight"]
    torch.save(state, path)
    conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")
    before, after = load_file(model / SINGLE), load_file(tmp_path / "back" / SINGLE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def written(plan: Plan, folder: Path) -> Path:
    plan.write(folder / "plan.json")
    return folder / "plan.json"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": 4096}, "hidden size of text_decoder 8192, config.json 4096"),
        ({"vocab_size": 32000}, "vocabulary 152064, config.json 32000"),
        ({"vocab_size": 160000}, "vocabulary 152064, config.json 160000"),
    ],
)
def test_a_plan_for_a_model_of_other_sizes_is_refused(tmp_path: Path, changes: dict[str, int], what: str):
    config = {
        "model_type": "qwen2_5_omni",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420},
        "audio_config": {"encoder_layers": 12, "d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120},
    }
    path = written(example_plan(), tmp_path)
    layout_from_plan(path, architecture_from_config(config, "config.json"))
    with pytest.raises(PlanError, match=what):
        layout_from_plan(path, architecture_from_config({**config, **changes}, "config.json"))


def test_a_tied_plan_is_not_for_an_untied_model(tmp_path: Path):
    plan = example_plan()
    path = written(replace(plan, model=replace(plan.model, tied_embeddings=True)), tmp_path)
    config = {
        "model_type": "qwen2_5_omni",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420},
        "audio_config": {"encoder_layers": 12, "d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120},
    }
    with pytest.raises(PlanError, match=r"tied, config\.json untied"):
        layout_from_plan(path, architecture_from_config(config, "config.json"))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("target", ["work/ck", "work", "work/ck/release", "link"])
def test_overwriting_never_removes_what_is_read(make_model: Make, tmp_path: Path, target: str):
    (tmp_path / "work").mkdir()
    model = make_model("work/hf")
    conversion.huggingface_to_checkpoint(model, tmp_path / "work" / "ck", plain(model))
    (tmp_path / "link").symlink_to("work/ck")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be replaced|is a symbolic link"):
        conversion.resplit(tmp_path / "work" / "ck", model, tmp_path / target, plain(model), overwrite=True)
    with pytest.raises(ConfigError, match=r"cannot be replaced|is a symbolic link"):
        conversion.checkpoint_to_huggingface(tmp_path / "work" / "ck", model, tmp_path / target, overwrite=True)
    assert everything(tmp_path) == before


def test_overwriting_its_own_model_or_the_files_it_links_to_is_refused(make_model: Make, tmp_path: Path):
    model = make_model()
    with pytest.raises(ConfigError, match="cannot be replaced"):
        conversion.huggingface_to_checkpoint(model, model, plain(model), overwrite=True)
    (tmp_path / "blobs").mkdir()
    (model / SINGLE).rename(tmp_path / "blobs" / "model.safetensors")
    (model / SINGLE).symlink_to(tmp_path / "blobs" / "model.safetensors")
    with pytest.raises(ConfigError, match="is a link into it"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "blobs", plain(model), overwrite=True)


def test_a_target_is_never_gone_while_it_is_replaced(make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between two renames a kill would leave nothing under the name."""
    model, target = make_model(), tmp_path / "ck"
    conversion.huggingface_to_checkpoint(model, target, plain(model))
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("two renames where one exchange does"))
    conversion.huggingface_to_checkpoint(model, target, plain(model), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "hf"]


def test_a_target_that_a_killed_conversion_had_moved_away_comes_back(make_model: Make, tmp_path: Path):
    from mindspeed_autoparallel.weights import folders

    model, target = make_model(), tmp_path / "ck"
    conversion.huggingface_to_checkpoint(model, target, plain(model))
    before = everything(target)
    gone = 2**22 + 1  # above the kernel's largest process id
    target.rename(tmp_path / f".ck.replaced-{folders._host()}-{gone}")
    (tmp_path / f".ck.partial-{folders._host()}-{gone}").mkdir()
    (tmp_path / ".ck.partial-elsewhere-1").mkdir()
    with pytest.raises(ConfigError, match="disk"), folders.whole_folder(target, overwrite=True):
        assert everything(target) == before
        raise OSError(28, "disk full")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ck.partial-elsewhere-1", "ck", "hf"]


def test_links_do_not_carry_files_into_a_result(make_model: Make, tmp_path: Path):
    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    (tmp_path / "secret").write_text("token")
    (model / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="symbolic link out of its folder"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")
    conversion.huggingface_to_checkpoint(model, tmp_path / "dist", plain(model), file_format="torch_dist")
    (tmp_path / "dist" / "release" / "extra").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        conversion.resplit(tmp_path / "dist", model, tmp_path / "again", plain(model), file_format="torch_dist")


def test_distributed_metadata_without_a_type_of_values_is_refused(make_model: Make, tmp_path: Path):
    import pickle

    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model), file_format="torch_dist")
    path = tmp_path / "ck" / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for described in metadata.state_dict_metadata.values():
        if hasattr(described, "chunks"):
            described.properties.dtype = described.chunks[0]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="should name the type of its values, and names a ChunkStorageMetadata"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


def test_distributed_metadata_reads_no_file_elsewhere(make_model: Make, tmp_path: Path):
    import pickle

    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model), file_format="torch_dist")
    path = tmp_path / "ck" / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    data = path.parent / next(iter(metadata.storage_data.values())).relative_path
    data.rename(tmp_path / "elsewhere")
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../../elsewhere")
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=r"not a file next to it"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**18},
        {"num_attention_heads": 0},
        {"vocab_size": "30"},
        {"hidden_size": [16]},
        {"vision_config": []},
        {"vision_config": {"depth": 3, "embed_dim": 16, "num_heads": 0}},
        {"tie_word_embeddings": "yes"},
        {"num_key_value_heads": 3},
    ],
)
def test_a_broken_config_is_one_line_that_names_the_key(make_model: Make, tmp_path: Path, changes: dict[str, Any]):
    model = make_model()
    change_config(model, **changes)
    with pytest.raises(ConfigError) as refused:
        read_architecture(model)
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


def test_rope_scaling_that_needs_flags_of_the_host_is_reported(
    make_model: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = make_model(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    assert "scales positions (yarn)" in caplog.text
