"""Whole conversions: torch_dist, damaged input, killed processes, the command."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exit_codes import exit_code
from forked_python import forked_python

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import TEXT, read_architecture
from mindspeed_autoparallel.weights.dist_metadata import read_metadata
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout

pytestmark = [pytest.mark.torch, pytest.mark.slow]
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

Make = Callable[..., Path]


def plain(model: Path) -> CheckpointLayout:
    return make_layout(read_architecture(model), layers={}, tensor_sizes={TEXT: 1})


def same_weights(left: Path, right: Path) -> bool:
    before, after = (
        {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in safetensors.load_file(path).items()}
        for folder in (left, right)
    )
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_torch_reads_what_is_written_as_torch_dist(make_model: Make, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model), file_format="torch_dist")
    norm = torch.zeros(4, 16)
    state = {"text_decoder.decoder.layers.self_attention.linear_qkv.layer_norm_weight": norm}
    dcp.load(state, checkpoint_id=str(tmp_path / "ck" / "release"), no_dist=True)
    expected = safetensors.load_file(model / "model.safetensors")["model.layers.3.input_layernorm.weight"]
    assert torch.equal(norm[3], expected)


def test_resplit_of_torch_dist_keeps_the_optimizer_state(make_model: Make, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = make_model()
    folder = tmp_path / "ck" / "iter_0000007"
    source = conversion.HuggingFaceSource(model)
    from mindspeed_autoparallel.weights.source import present_entries

    state = {entry.name: source.load(entry).clone() for entry in present_entries(source)}
    moments = {f"optimizer.state.exp_avg.{name}": tensor * 2 for name, tensor in state.items()}
    dcp.save({**state, **moments}, checkpoint_id=str(folder), no_dist=True)
    torch.save({"iteration": 7}, folder / "common.pt")
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("7")
    assert conversion.resplit(tmp_path / "ck", model, tmp_path / "b", plain(model), file_format="torch_dist")
    name = "optimizer.state.exp_avg.text_decoder.decoder.layers.1.mlp.linear_fc2.weight"
    loaded = {name: torch.zeros_like(moments[name])}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "b" / "iter_0000007"), no_dist=True)
    assert torch.equal(loaded[name], moments[name])
    assert not conversion.resplit(tmp_path / "ck", model, tmp_path / "mm", plain(model))
    assert (tmp_path / "mm" / "iter_0000007" / "mp_rank_00").is_dir()
    conversion.checkpoint_to_huggingface(tmp_path / "mm", model, tmp_path / "back")
    assert same_weights(model, tmp_path / "back")


def test_optimizer_state_cut_by_data_parallel_rank_is_refused(make_model: Make, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, folder = make_model(), tmp_path / "ck" / "release"
    state = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0": torch.zeros(3)}
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(ConfigError, match="fits only the layout that wrote it"):
        conversion.resplit(tmp_path / "ck", model, tmp_path / "b", plain(model), file_format="torch_dist")


def test_metadata_is_read_without_torch_s_checkpoint_package(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model), file_format="torch_dist")
    metadata = read_metadata(tmp_path / "ck" / "release")
    kinds = {type(one).__module__ for one in (metadata, *metadata.storage_data, *metadata.storage_data.values())}
    assert kinds == {read_metadata.__module__}, "its import takes longer than reading"


def test_metadata_that_would_run_code_is_refused(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model), file_format="torch_dist")
    path = tmp_path / "ck" / "release" / ".metadata"
    path.write_bytes(pickle.dumps(subprocess.Popen))
    with pytest.raises(ConfigError, match=r"subprocess.Popen has no place"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


def test_missing_and_corrupt_shards_are_named(make_model: Make, tmp_path: Path) -> None:
    model = make_model(max_shard_bytes=4096)
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) > 3
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match=f"{shards[1].name} is corrupt"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=f"1 of {len(shards)} shards are missing: {shards[1].name}"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(ConfigError, match="which the index lists"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    assert not (tmp_path / "ck").exists()


def test_weights_that_do_not_belong_to_the_config_are_named(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(ConfigError, match=r"tensor\(s\) are missing: text_decoder.decoder.layers.4"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="have no place in a qwen2_vl model"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))


def test_pickled_weights_of_hugging_face_are_refused(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickles"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))


def test_a_damaged_rank_file_is_named(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))
    path = tmp_path / "ck" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ConfigError, match=r"model_optim_rng\.pt"):
        conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")


def test_an_existing_target_is_kept_without_overwrite(make_model: Make, tmp_path: Path) -> None:
    model, target = make_model(), tmp_path / "ck"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(ConfigError, match="--overwrite"):
        conversion.huggingface_to_checkpoint(model, target, plain(model))
    with pytest.raises(ConfigError, match=r"holds precious\. --overwrite replaces checkpoints and nothing else"):
        conversion.huggingface_to_checkpoint(model, target, plain(model), overwrite=True)
    assert (target / "precious").exists()
    (target / "precious").unlink()
    conversion.huggingface_to_checkpoint(model, target, plain(model), overwrite=True)
    conversion.huggingface_to_checkpoint(model, target, plain(model), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "hf"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_overwrite_leaves_the_old_checkpoint(make_model: Make, tmp_path: Path) -> None:
    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model))

    def fail(done: int, total: int, what: str) -> None:
        if done == 5:
            raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model), overwrite=True, progress=fail)
    conversion.checkpoint_to_huggingface(tmp_path / "ck", model, tmp_path / "back")
    assert same_weights(model, tmp_path / "back")


def test_torch_reads_what_is_written_as_dcp_and_what_it_saved_is_read(make_model: Make, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import format_utils

    model = make_model()
    conversion.huggingface_to_checkpoint(model, tmp_path / "ck", plain(model), file_format="dcp")
    expected = safetensors.load_file(model / "model.safetensors")
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "ck" / "release"), no_dist=True)
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in expected.items())
    format_utils.dcp_to_torch_save(tmp_path / "ck" / "release", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert sorted(whole["model"]) == sorted(expected), "nested as it was saved, without a model to load into"

    moments = {name: tensor * 2 for name, tensor in expected.items()}
    dcp.save(
        {"model": expected, "optimizer": {"exp_avg": moments}}, checkpoint_id=str(tmp_path / "saved"), no_dist=True
    )
    conversion.checkpoint_to_huggingface(tmp_path / "saved", model, tmp_path / "back")
    assert same_weights(model, tmp_path / "back")


FULL = """
import resource, sys
from pathlib import Path
from mindspeed_autoparallel.cli.main import main
sys.dont_write_bytecode = True  # a file cut off at the limit would stay in the cache
resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))
raise SystemExit(main(["convert", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("direction", ["hf-to-mm", "torch_dist", "mm-to-hf"])
def test_a_full_disk_is_one_line_and_leaves_nothing(make_model: Make, tmp_path: Path, direction: str) -> None:
    model, target = make_model(), tmp_path / "new" / "ck"
    arguments = ["hf-to-mm", str(model), str(target)]
    if direction == "torch_dist":
        arguments += ["--format", "torch_dist"]
    if direction == "mm-to-hf":
        conversion.huggingface_to_checkpoint(model, tmp_path / "mm", plain(model))
        arguments = ["mm-to-hf", str(tmp_path / "mm"), str(target), "--hf-dir", str(model)]
    done = subprocess.run([forked_python(), "-c", FULL, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "new").iterdir())


KILLED = """
import sys, time
from pathlib import Path
from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import TEXT, read_architecture
from mindspeed_autoparallel.weights.layouts import make_layout
model, target = map(Path, sys.argv[1:])
layout = make_layout(read_architecture(model), layers={TEXT: ((1, 1, 2),)}, tensor_sizes={})
def slow(done, total, what):
    if what.endswith("stage 2"):
        print("stage 2", flush=True)
        time.sleep(60)
conversion.huggingface_to_checkpoint(model, target, layout, progress=slow)
"""


def test_a_killed_conversion_leaves_nothing_that_loads_and_the_next_one_cleans_up(
    make_model: Make, tmp_path: Path
) -> None:
    model, target = make_model(), tmp_path / "ck"
    command = [sys.executable, "-c", KILLED, str(model), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert not target.exists()
    (leftover,) = (path for path in tmp_path.iterdir() if path.name != "hf")
    assert leftover.name.startswith(".ck.partial-")
    with pytest.raises(ConfigError, match="not a checkpoint"):
        conversion.checkpoint_to_huggingface(leftover, model, tmp_path / "back")
    conversion.huggingface_to_checkpoint(model, target, plain(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "hf"]


def test_the_command_goes_there_and_back(make_model: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(max_shard_bytes=8192)
    (model / "tokenizer.json").write_text("{}")
    there = ["convert", "hf-to-mm", str(model), str(tmp_path / "a"), "--llm-pp-layers", "1,3", "--tp-size", "2"]
    assert main([*there, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["direction"] == "hf-to-mm"
    result = {
        "parallel_config": {"PP": 2, "TP": 1},
        "layer_placement": {"vit_layer_placement": [3, 0], "llm_layer_placement": [2, 2]},
    }
    (tmp_path / "plan.json").write_text(json.dumps(result))
    again = ["convert", "resplit", str(tmp_path / "a"), str(tmp_path / "b"), "--hf-dir", str(model)]
    assert main([*again, "--plan", str(tmp_path / "plan.json")]) == 0
    assert "no optimizer state" in capsys.readouterr().out
    back = ["convert", "mm-to-hf", str(tmp_path / "b"), str(tmp_path / "back"), "--hf-dir", str(model)]
    assert main(back) == 0
    assert same_weights(model, tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--llm-pp-layers", "1,2"], "1 too few"),
        (["--tp-size", "3"], "--tp-size 3"),
        (["--tp-size", "0"], "--tp-size: must be a whole number of at least 1"),
        (["--vit-tp-size", "-1"], "--vit-tp-size: must be a whole number of at least 1"),
        (["--ep-size", "0"], "--ep-size: must be"),
        (["--max-shard-mib", "9"], "--max-shard-mib: it is for mm-to-hf"),
        (["--hf-dir", "hf"], "--hf-dir: the source"),
        (["--make-vocab-size-divisible-by", "0"], "--make-vocab-size-divisible-by: must be"),
        (["--plan", "x.json", "--tp-size", "2"], "--tp-size: --plan has"),
        (["--plan", "x.json", "--ep-size", "2", "--hetero"], "--ep-size, --hetero: --plan has"),
        (["--plan", "absent.json"], "absent.json"),
    ],
)
def test_bad_input_ends_with_two_and_one_line(
    make_model: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert exit_code(["convert", "hf-to-mm", str(make_model()), str(tmp_path / "a"), *more]) == 2
    told: Any = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", "mm-to-hf", "a", "b", "--hf-dir", "hf", "--format", "dcp"], "--format: a Hugging Face folder"),
        (["convert", "mm-to-hf", "a", "b", "--hf-dir", "hf", "--tp-size", "2"], "--tp-size: a Hugging Face folder"),
        (["convert", "mm-to-hf", "a", "b", "--hf-dir", "hf", "--max-shard-mib", "0"], "--max-shard-mib: must be"),
        (["calibrate", "base.sqlite", "--device", "H100"], "--device: only --from-log"),
        (["calibrate", "--from-log", "a.log", "--device", "H100", "--processes", "2"], "--processes: --from-log"),
        (["preflight", "--result", "r.json", "--memory-limit-mib", "9", "--ranks", "ends"], "--ranks: --result"),
    ],
)
def test_a_flag_that_this_use_does_not_read_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert exit_code(words) == 2
    assert said in capsys.readouterr().err
