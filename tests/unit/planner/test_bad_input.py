"""Refusals of plan: exit code 2 and one line with the fault, never a traceback, never a hang."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from exit_codes import exit_code
from small_profile import small_profile

from mindspeed_autoparallel.spec import to_json

LAYER = ("measurements", 0, "modules", "text_decoder", "layer")
ARGUMENTS = ("--nnodes", "1", "--nproc-per-node", "4", "--global-batch-size", "16", "--json")
REMOVED = object()


def _plan(folder: Path, text: str, *more: str) -> object:
    path = folder / "profile.json"
    path.write_text(text)
    return exit_code(["plan", "--profile", str(path), *ARGUMENTS, *more])


def _edited(value: Any, path: tuple[str | int, ...], new: object) -> str:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if new is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return json.dumps(value)


def _mindspeed() -> dict[str, Any]:
    value: dict[str, Any] = {
        name: {"fwd_time": 4.0, "bwd_time": 8.0, "act_mem": 100.0, "module_param": [100.0, 300.0, 100.0]}
        for name in ("vit_pre", "vit", "vit_post", "llm_pre", "llm", "llm_post")
    }
    value["image_encoder"] = {"vision_encoder": {"num_layers": 3}}
    value["text_decoder"] = {"num_layers": 5, "hidden_size": 1024, "seq_length": 256}
    value["micro_batch_size"] = 1
    return value


def _refused(capsys: pytest.CaptureFixture[str], code: object, word: str) -> None:
    out = capsys.readouterr()
    assert code == 2
    assert not out.out or json.loads(out.out)["status"] == "error"
    assert word in out.err
    assert "Traceback" not in out.err


@pytest.mark.parametrize(
    ("path", "new", "word"),
    [
        ((*LAYER, "forward_us"), -1, "must not be negative"),
        ((*LAYER, "backward_us"), float("nan"), "finite"),
        ((*LAYER, "forward_us"), float("inf"), "finite"),
        ((*LAYER, "forward_us"), "3", "expected float"),
        (LAYER, REMOVED, "'layer' is missing"),
        ((*LAYER, "recompute"), {}, "'none'"),
        (("measurements", 0, "modules", "text_decoder"), REMOVED, "'text_decoder'"),
        (("measurements",), [], "no measurements"),
        (("model", "modules", 1, "num_layers"), 0, "num_layers must be 1"),
        (("model", "modules", 1, "num_layers"), 10**6, "num_layers must be 1"),
        (("device", "memory_capacity_bytes"), 0, "above 0"),
        (("surprise",), 1, "unknown key 'surprise'"),
        (("variable_data",), {"modules": ["audio"], "samples": [[1.0]]}, "'audio' is not a module"),
        (("variable_data",), {"modules": ["text_decoder"], "samples": [[-1.0]]}, "must not be negative"),
        (("variable_data",), {"modules": ["text_decoder"], "samples": []}, "every sample"),
    ],
)
def test_a_wrong_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[str | int, ...], new: object, word: str
) -> None:
    _refused(capsys, _plan(tmp_path, _edited(to_json(small_profile()), path, new)), word)


def test_times_too_long_for_nanoseconds_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _edited(to_json(small_profile()), (*LAYER, "forward_us"), 1e300)
    _refused(capsys, _plan(tmp_path, text, "--nproc-per-node", "1"), "forward_us must be at most 1e+12")


@pytest.mark.parametrize(
    ("path", "new", "word"),
    [
        (("llm", "fwd_time"), -1, "llm.fwd_time"),
        (("llm", "fwd_time"), float("nan"), "llm.fwd_time"),
        (("vit_pre",), REMOVED, "missing required field `vit_pre`"),
        (("text_decoder", "num_layers"), 0, "num_layers"),
        (("text_decoder", "num_layers"), 10**6, "num_layers"),
        (("text_decoder",), REMOVED, "is missing"),
        (("llm", "module_param"), [1], "module_param"),
        (("micro_batch_size",), 0, "micro_batch_size"),
    ],
)
def test_a_wrong_mindspeed_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[str | int, ...], new: object, word: str
) -> None:
    _refused(capsys, _plan(tmp_path, _edited(_mindspeed(), path, new)), word)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    _refused(capsys, _plan(tmp_path, text), "profile")


@pytest.mark.parametrize(
    ("flag", "value", "word"),
    [
        ("--nnodes", "0", "--nnodes: must be a whole number of at least 1, got '0'"),
        ("--nnodes", "-3", "--nnodes: must be a whole number of at least 1, got '-3'"),
        ("--nnodes", str(2**20), "devices are more than"),
        ("--nproc-per-node", "0", "--nproc-per-node: must be a whole number of at least 1, got '0'"),
        ("--global-batch-size", "0", "global batch size"),
        ("--global-batch-size", str(2**20), "operations"),
        ("--memory-limit-mib", "0", "above 0"),
        ("--memory-limit-mib", "nan", "above 0"),
        ("--memory-limit-mib", "1e308", "above 0"),
        ("--top-k", "0", "top_k"),
        ("--time-limit-s", "nan", "time limit"),
        ("--seed", "-1", "seed"),
        ("--virtual-sizes", "0", "--virtual-sizes"),
        ("--profile-tensor-size", "0", "--profile-tensor-size"),
    ],
)
def test_a_wrong_flag_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, word: str
) -> None:
    _refused(capsys, _plan(tmp_path, json.dumps(to_json(small_profile())), flag, value), word)


@pytest.mark.parametrize(("flag", "value"), [("--nnodes", 10**20), ("--global-batch-size", 10**12)])
def test_a_number_beyond_every_cluster_is_refused_with_the_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: int
) -> None:
    assert _plan(tmp_path, json.dumps(to_json(small_profile())), flag, str(value)) == 2
    assert f"argument {flag}: must be at most 1048576, got '{value}'" in capsys.readouterr().err


def test_a_batch_that_no_layout_divides_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = _mindspeed()
    value["micro_batch_size"] = 2
    code = _plan(tmp_path, json.dumps(value), "--global-batch-size", "7")
    _refused(capsys, code, "not divisible")
