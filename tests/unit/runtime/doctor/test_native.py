"""Findings about YAML files of MindSpeed-MM's native FSDP2 trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from native_files import TEXT

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.runtime.doctor.native import check_native_file

STACK = "      - model.layers.{*}  # the language model\n"


def found(folder: Path, text: str) -> list[tuple[str, str, str]]:
    path = folder / "config.yaml"
    path.write_text(text)
    return [(finding.status, finding.check, finding.what) for finding in check_native_file(path)]


@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        ("model:\n", "model:\n  recompute: true\n", "advice", "model.recompute has no effect"),
        ("parallel:\n", "parallel:\n  context_parallel_size: 2\n", "advice", "parallel.context_parallel_size has no"),
        ("features:\n", "features:\n  enable_chunk_los: true\n", "advice", "features.enable_chunk_los has no effect"),
        ("- model.layers.{*}  #", "- model.layers.{3}  #", "problem", "{3-3} for one layer"),
        ("    - model.layers.{*}\n", "    - model.layers.{*}\n" * 2, "advice", "lists model.layers.{*} twice"),
        ('["model.layers.{*}"]', "[model.layers.3]", "advice", "has model.layers.3 alone"),
        ('["model.layers.{*}"]', '["model.layers.{*}.mlp"]', "advice", "offloads whole layers"),
        ("expert_parallel_size: 1", "expert_parallel_size: 1", "advice", "expert_parallel_size is 1 with ep_plan"),
        ("    param_dtype", "    num_to_forward_prefetch: 1\n    param_dtype", "advice", "before model.layers"),
        ("  init_model_with_meta_device: true\n", "", "advice", "without init_model_with_meta_device"),
        ("data:", "dat:", "problem", "no section 'data'"),
    ],
)
def test_settings_with_unnoticed_effects_are_found(tmp_path: Path, old: str, new: str, status: str, words: str) -> None:
    # A stack inside another one, listed in front of it; a size of one is DistributedDataParallel.
    text = TEXT.replace(STACK, "      - model.layers.{*}.mlp\n" + STACK) if "prefetch" in new else TEXT
    text = text.replace("size: auto", "size: 1") if "meta" in old else text
    assert old in text
    findings = found(tmp_path, text.replace(old, new))
    assert any(one[0] == status and words in one[2] for one in findings), findings


def test_patterns_are_compared_with_the_checkpoints_modules(tmp_path: Path) -> None:
    weights = {f"model.layers.{index}.mlp.weight": "a" for index in range(4)} | {"lm_head.weight": "a"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    findings = found(tmp_path, TEXT.replace("/nowhere", str(tmp_path)))
    missing = [what for _, check, what in findings if "matches no module" in what]
    assert any("model.visual.blocks" in what for what in missing) and not any("lm_head" in what for what in missing)


def test_the_command_reads_a_yaml_and_ends_with_one_where_something_fails(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    assert main(["doctor", "--script", str(path)]) == 0
    path.write_text(TEXT.replace("model.layers.{*}  #", "model.layers.{0-1,3-3}  #"))
    assert main(["doctor", "--script", str(path)]) == 1
    assert "the trainer refuses the module pattern" in capsys.readouterr().out
