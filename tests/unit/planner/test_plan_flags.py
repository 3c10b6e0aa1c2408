"""Every flag of `plan` in every kind of search: it changes what is searched, or it is refused before that."""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import pytest
from sharded_profile import drawn_profile
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import build_parser, main
from mindspeed_autoparallel.planner import wanted
from mindspeed_autoparallel.planner.sharded import search as sharded

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
CLUSTER = ["--nnodes", "1", "--nproc-per-node", "4"]
BATCH = ["--global-batch-size", "16"]
COMPUTED = ["--model", str(EXAMPLES / "qwen3_8b_config.json"), "--seq-length", "512", "--device", "H100"]
KINDS = {
    "profile": ["--profile", "profile.json", *BATCH],
    "file of MindSpeed": ["--profile", str(EXAMPLES / "model_profile.json"), *BATCH],
    "computed": [*COMPUTED, *BATCH],
    "computed with encoders": ["--model", "config.json", "--seq-length", "512", "--device", "H100", *BATCH],
    "encoders' layouts": ["--profile", "profile.json", *BATCH, "--hetero-parallel"],
    "fsdp2": ["--fsdp2", "fsdp2.yaml", *COMPUTED],
    "fsdp2, measured": ["--fsdp2", "fsdp2.yaml", "--profile", "sharded.json"],
}
VISION = {
    "patch_size": 14,
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 2,
    "out_hidden_size": 256,
}
TEXT = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
CONFIG = {"model_type": "qwen2_5_vl", "vocab_size": 1000, **TEXT, "vision_config": VISION}
FSDP2 = """parallel:
  fully_shard_parallel_size: auto
  fsdp_plan: {apply_modules: ["model.layers.{*}", lm_head], param_dtype: bf16, reduce_dtype: fp32}
data: {dataset_param: {basic_parameters: {cutoff_len: 512}}}
model: {model_id: qwen3, model_name_or_path: ./model}
features: {recompute: true, recompute_plan: {apply_modules: ["model.layers.{*}"]}}
training: {micro_batch_size: 1, gradient_accumulation_steps: 2, train_iters: 1, init_model_with_meta_device: true}
"""

VALUES = {
    "--profile": "other.json",
    "--profile-source": "analytic",
    "--model": str(EXAMPLES / "llama3_70b.json"),
    "--train": "precision=fp8",
    "--image-size": "224x224",
    "--device": "A100",
    "--device-file": "device.json",
    "--fsdp2": "other.yaml",
    "--tokens": "1T",
    "--virtual-sizes": "2",
    "--schedules": "1f1b,gpipe",
    "--candidate": "candidate.json",
    "--hetero-balance": "global",
    "--mm-model": "model.json",
    "--data": "data.json",
    "--mm-data": "records.json",
    "--data-padding": "none",
    "--max-oom-probability": "0.5",
    "--out": "out",
    "--script": "script.sh",
    "--megatron-release": "0.12",
}
"""Values of flags that take no number."""
SAME_PLAN = {"--help", "--seed", "--num-workers", "--quiet", "--verbose", "--json"}
"""Flags that choose how a search runs or prints."""
AFTERWARDS = {"--out", "--why", "--script", "--tokens"}
"""Flags that are read when the plan is there; an FSDP2 plan has --out alone."""


class Searched(Exception):
    """Ends a command where its search would begin, with everything that the search is given."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("flags")
    small_profile().write(found / "profile.json")
    drawn_profile(random.Random(0), 4).write(found / "sharded.json")
    (found / "config.json").write_text(json.dumps(CONFIG))
    (found / "fsdp2.yaml").write_text(FSDP2)
    return found


def flags() -> list[argparse.Action]:
    parser = build_parser(["plan"])
    commands = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return [one for one in commands.choices["plan"]._actions if one.option_strings]


def ways(action: argparse.Action, kind: str) -> list[list[str]]:
    """Words of a command line that give ``action`` other values than its default."""
    if action.nargs == 0:
        return [[flag] for flag in action.option_strings]
    flag = action.option_strings[0]
    if flag == "--profile-source" and "--model" in KINDS[kind]:
        return [[flag, "file"]]
    return [[flag, VALUES.get(flag, "7")]]


def outcome(kind: str, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the search is given, or the error before it."""

    def searched(*arguments: object, **options: object) -> None:
        raise Searched(re.sub(r" at 0x\w+|created_utc='[^']*'", "", repr((arguments, sorted(options.items())))))

    monkeypatch.setattr(wanted, "find_plan", searched)
    monkeypatch.setattr(sharded, "search_sharded", searched)
    try:
        assert main(["plan", *KINDS[kind], *CLUSTER, *more, "--quiet"]) == 2
    except Searched as reached:
        return str(reached)
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_changes_the_search_or_is_refused(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    plain = outcome(kind, [], monkeypatch, capsys)
    assert not plain.startswith("ConfigError"), plain
    assert plain == outcome(kind, [], monkeypatch, capsys), "the same words give the same search"
    afterwards = {"--out"} if kind.startswith("fsdp2") else AFTERWARDS
    left = [one for one in flags() if not {*one.option_strings} & {*SAME_PLAN, *afterwards, *KINDS[kind]}]
    ignored = [
        action.option_strings[0]
        for action in left
        if all(outcome(kind, words, monkeypatch, capsys) == plain for words in ways(action, kind))
    ]
    assert not ignored


@pytest.mark.parametrize(("kind", "default_s"), [("profile", 600.0), ("fsdp2", 60.0)])
def test_a_time_limit_counts_whatever_the_default_is(
    kind: str, default_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for words, limit_s in (([], default_s), (["--time-limit-s", "60"], 60.0), (["--time-limit-s", "600"], 600.0)):
        assert f"time_limit_s={limit_s}," in outcome(kind, words, monkeypatch, capsys), words


def test_samples_need_a_profile_with_their_bytes_before_anything_is_searched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "lengths.json").write_text(json.dumps([32, 64, 96] * 20))
    assert main(["data", "describe", "--lengths", "lengths.json", "--output", "sizes.json"]) == 0
    monkeypatch.setattr(wanted, "search", None)
    assert main(["plan", *KINDS["file of MindSpeed"], *CLUSTER, "--data", "sizes.json", "--quiet"]) == 2
    assert "MindSpeed's file has one figure a layer" in capsys.readouterr().err
