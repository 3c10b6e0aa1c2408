"""Flags of the switches that a price rests on: read back by Megatron's names, they are the switches again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from flag_sets import DEVICES, drawn_switches

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.analytic.reading_train import state_type
from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.predict.analytic_profile import stated_train
from mindspeed_autoparallel.predict.megatron_arguments import switches_of_arguments
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.predict.train_flags import Host, flags_of_switches
from mindspeed_autoparallel.spec import Plan

_SHAPE: dict[str, Any] = {"num_layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "seq": 1024, "vocab": 32000}
_EXPERTS = {**_SHAPE, "type": "moe", "num_experts": 8, "topk": 2, "moe_ffn": 512, "swiglu": True}
_BY_LAYOUT = ("overlap_grad_reduce", "tp_comm_overlap", "moe_a2a_overlap")
_HIDDEN = {"rope_fusion": True, "stack": "megatron-core", "dropout": True, "gradient_accumulation_fusion": True}
"""What no flag states because it is the host's default."""
_STATE = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_NOT_READ = ("rope_fusion", "bias_activation_fusion")
"""Switches that a launch's flags are not searched for."""


def _taken(key: str, *, on_ascend: bool) -> tuple[str, ...]:
    """Return the types, beside fp32, that Megatron's parser takes."""
    if key == "main_params_dtype":
        return ("fp16",)
    return ("fp16", "fp8") if on_ascend else ("fp16", "fp8", "bf16")


def _arguments(words: list[str]) -> dict[str, object]:
    """Return ``words`` of a launch by Megatron's names, without its parser."""
    values: dict[str, object] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            values[word[2:].replace("-", "_")] = True if following.startswith("--") else following
    return values


@pytest.mark.parametrize("seed", range(60))
def test_the_flags_are_read_back_as_the_switches(seed: int) -> None:
    drawn = random.Random(seed)
    device, shape = find_device(drawn.choice(DEVICES)), drawn.choice([_SHAPE, _EXPERTS])
    train = stated_train([Section("text_decoder", shape)], device, drawn_switches(device, drawn))
    on_ascend = "Ascend" in device.name
    words, left = flags_of_switches(train, Host(on_ascend, (0, 20)))
    state = {key: state_type(train[key]) for key in _STATE if key in train}
    refused = [key for key, form in state.items() if form not in ("fp32", *_taken(key, on_ascend=on_ascend))]
    # Megatron-LM refuses Transformer Engine's loss from 0.18 on.
    assert left == tuple(sorted([*refused, *["cross_entropy_fusion"] * bool(train["cross_entropy_fusion"])]))
    sizes: dict[str, object] = {"num_experts": 8} if "num_experts" in shape else {}
    sizes |= {"transformer_impl": "local"} if on_ascend else {}
    found = {**_HIDDEN, **switches_of_arguments({**sizes, **_arguments(words)})}
    expected = {key: value for key, value in train.items() if key not in (*_BY_LAYOUT, *_NOT_READ, *_STATE, *left)}
    expected |= {key: form for key, form in state.items() if form != "fp32" and key not in left}
    if expected.get("cuda_graph") == "full_iteration":
        expected["cuda_graph"] = "local"  # one flag for both, and another for how much
    assert {key: found.get(key) for key in expected} == expected, (words, train)


def test_every_key_of_a_training_has_a_flag_or_is_named() -> None:
    values: dict[str, object] = {"precision": "mxfp8", "cuda_graph": "local", "attention": "unfused", "task": "dpo"}
    values |= {"lora": {"r": 8}, "offload": ["swap-optimizer"], "recompute_extra": ["recompute-norm"]}
    values |= {"optimizer": "adam", "loss_slices": 2, "exp_avg_dtype": "bf16", "optimizer_offload_fraction": 0.5}
    for key in sorted(KNOWN["train"]):
        for on_ascend in (False, True):
            words, left = flags_of_switches({key: values.get(key, True)}, Host(on_ascend, (0, 12)))
            assert all(isinstance(word, str) for word in words) and set(left) <= {key}


def test_a_plan_states_its_recipe_and_its_script_turns_it_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(_SHAPE))
    base = ["plan", "--model", str(tmp_path / "model.json"), "--nnodes", "1", "--nproc-per-node", "2"]
    base += ["--global-batch-size", "8", "--time-limit-s", "5"]
    script = tmp_path / "launch.sh"
    recipe = ["--device", "H100", "--train", "precision=fp8", "--train", "exp_avg_dtype=bf16"]
    assert main([*base, *recipe, "--script", str(script), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in (printed, " ".join(script.read_text().split())):
        assert "--bf16 --fp8-format hybrid --fp8-recipe tensorwise" in text
        assert "--use-precision-aware-optimizer --exp-avg-dtype bf16" in text
    plan = Plan.read(tmp_path / "plan.json")
    assert plan.profile.train["precision"] == "fp8" and plan.profile.train["grad_reduce_in_bf16"] is True
    assert main([*base, "--device", "A100-80GB", "--train", "precision=fp8"]) == 2
    assert "A100-80GB has no peak_fp8_tflops" in capsys.readouterr().err


def test_a_recipe_in_others_words_has_its_flags_and_a_switch_without_a_flag_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(_SHAPE))
    words = [
        "plan",
        "--model",
        str(tmp_path / "model.json"),
        "--device",
        "H100",
        "--nnodes",
        "1",
        "--time-limit-s",
        "5",
    ]
    words += ["--nproc-per-node", "2", "--global-batch-size", "8"]
    assert main([*words, "--train", "precision=FP8-CS", "--train", "cross_entropy_fusion=true"]) == 0
    printed = capsys.readouterr().out
    assert "--grad-reduce-in-bf16" in printed and "--fp8-recipe tensorwise" in printed
    assert "priced with train.cross_entropy_fusion too, for which no flag is known here" in printed


def test_a_length_beside_a_measured_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--profile", str(tmp_path / "profile.json"), "--nnodes", "1", "--nproc-per-node", "1"]
    assert main([*words, "--global-batch-size", "8", "--seq-length", "64"]) == 2
    assert "--seq-length: requires --profile-source analytic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("precision", "KEY=VALUE such as precision=fp8"),
        ("precisoin=fp8", "did you mean precision?"),
        ("gbs=8", "the batch is --global-batch-size"),
        ("recompute=full", "the search chooses it"),
        ("precision=fp9", "train.precision is 'fp9'"),
        ("lora=3", "train.lora"),
    ],
)
def test_a_wrong_switch_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(_SHAPE))
    words = ["plan", "--model", str(tmp_path / "model.json"), "--device", "H100", "--nnodes", "1"]
    assert main([*words, "--nproc-per-node", "1", "--global-batch-size", "8", "--train", word]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_wrong_flag_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--nnodes", "1", "--nproc-per-node", "1", "--precision", "fp8"])
    assert ended.value.code == 2 and "mindspeed-autoparallel plan --help" in capsys.readouterr().err
