"""The optimizer's state in rank folders of another layout: what follows, what stays behind and why."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import conversion
from mindspeed_autoparallel.weights.architecture import TEXT, read_architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout
from mindspeed_autoparallel.weights.spelling import GROUPED, LOCAL, TRANSFORMER_ENGINE, Spelling

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

Make = Callable[..., Path]
SPLIT = ((1, 3),)
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 32, "vision_config": None}
MIXTRAL: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def layout(model: Path, text: Any = None, tp: int = 1, **more: Any) -> CheckpointLayout:
    return make_layout(read_architecture(model), layers={TEXT: text}, tensor_sizes={TEXT: tp}, **more)


def trained(
    model: Path, target: Path, *, num_groups: int = 2, distributed: bool = False, later: bool = False, **arguments: Any
) -> Path:
    """Write ``model`` as one rank's folder of iteration 3 with Adam's state, as Megatron saves it."""
    conversion.huggingface_to_checkpoint(model, target, layout(model))
    (target / "release").rename(target / "iter_0000003")
    (target / "latest_checkpointed_iteration.txt").write_text("3")
    path = target / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=True)
    parameters = list(content["model"].items())
    decayed = [value.dim() > 1 for _, value in parameters]
    order = [n for n, one in enumerate(decayed) if one] + [n for n, one in enumerate(decayed) if not one]
    generator = torch.Generator().manual_seed(1)
    moments = {
        n: {k: torch.rand(parameters[n][1].shape, generator=generator) for k in ("exp_avg", "exp_avg_sq")}
        for n in order
    }
    settings = [{"wd_mult": float(number == 0), "lr": 0.1, "step": 3} for number in range(num_groups)]
    if later:
        settings = [{**one, "default_config": True} for one in settings]
    if distributed:
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": settings}}
        flat = {kind: torch.zeros(0) for kind in ("param", "exp_avg", "exp_avg_sq")}
        for n in reversed(range(len(parameters))):
            for kind, values in flat.items():
                gap = torch.zeros(-len(values) % 64)
                one = parameters[n][1] if kind == "param" else moments[n][kind]
                flat[kind] = torch.cat([values, gap, one.flatten()])
        buffer = {**flat, "numel_unpadded": len(flat["param"])}
        stored = {"buckets_coalesced": True, 0: {(torch.float32, torch.float32): buffer}}
        torch.save(stored, path.parent / "distrib_optim.pt")
    else:
        count = sum(decayed)
        members = [list(range(count)), list(range(count, len(order))), *([[]] * (num_groups - 2))]
        groups = [{**one, "params": numbers} for one, numbers in zip(settings, members, strict=True)]
        state = {number: {"step": torch.tensor(3.0), **moments[n]} for number, n in enumerate(order)}
        optimizer = {"state": state, "param_groups": groups}
    content |= {"optimizer": optimizer, "args": argparse.Namespace(consumed_train_samples=24, **arguments)}
    content |= {"opt_param_scheduler": {"max_lr": 0.1}, "iteration": 3}
    torch.save(content, path)
    return target


def resplit(folder: Path, model: Path, target: Path, wanted: CheckpointLayout, **more: Any) -> bool:
    return conversion.resplit(folder, model, target, wanted, **more)


def tensors_of(folder: Path) -> dict[str, Any]:
    from dist_tensors import stored_tensors

    return stored_tensors(folder / "iter_0000003")


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("text", "tp"), [(SPLIT, 1), (None, 2), (((1, 1), (1, 1)), 2)])
def test_state_goes_to_another_layout_and_back_to_the_bit(
    make_model: Make, tmp_path: Path, text: Any, tp: int, tied: bool, distributed: bool
) -> None:
    model = make_model(**LLAMA, tie_word_embeddings=tied)
    old = trained(model, tmp_path / "old", distributed=distributed)
    assert resplit(old, model, tmp_path / "new", layout(model, text, tp))
    whole = [tmp_path / "whole of old", tmp_path / "whole of new"]
    for source, target in zip((old, tmp_path / "new"), whole, strict=True):
        assert resplit(source, model, target, layout(model), file_format="torch_dist", spelling=Spelling(LOCAL))
    expected, found = map(tensors_of, whole)
    assert sum("exp_avg" in name for name in expected) > 10 and sorted(found) == sorted(expected)
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []


def test_the_files_hold_the_position_and_the_sizes_of_the_new_layout(make_model: Make, tmp_path: Path) -> None:
    model = make_model(**LLAMA)
    old = trained(model, tmp_path / "old", tensor_model_parallel_size=1)
    assert resplit(old, model, tmp_path / "new", layout(model, SPLIT, 2))
    content = torch.load(
        tmp_path / "new" / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt", weights_only=False
    )
    given = content["args"]
    assert (given.consumed_train_samples, given.tensor_model_parallel_size, given.pipeline_model_parallel_size) == (
        24,
        2,
        2,
    )
    assert content["iteration"] == 3 and content["opt_param_scheduler"] == {"max_lr": 0.1}
    groups = content["optimizer"]["param_groups"]
    # A stage without the embedding meets a norm first.
    assert [group["wd_mult"] for group in groups] == [0.0, 1.0]
    numbers = [number for group in groups for number in group["params"]]
    assert numbers == sorted(content["optimizer"]["state"]) == list(range(len(content["model"])))
    steps = [one["step"] for one in content["optimizer"]["state"].values()]
    steps[0] += 1  # each parameter counts its own
    assert [float(step) for step in steps[:2]] == [4.0, 3.0]


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("release", "wanted"), [("0.12", [0.0, 1.0]), ("0.16", [1.0, 0.0])])
def test_groups_stand_in_the_order_of_the_release_that_saved(
    make_model: Make, tmp_path: Path, distributed: bool, release: str, wanted: list[float]
) -> None:
    model = make_model(**LLAMA)
    old = trained(model, tmp_path / "old", distributed=distributed, later=release == "0.16")
    assert resplit(old, model, tmp_path / "new", layout(model, SPLIT))
    for stage, order in ((0, [1.0, 0.0]), (1, wanted)):
        path = tmp_path / "new" / "iter_0000003" / f"mp_rank_00_00{stage}" / "model_optim_rng.pt"
        optimizer = torch.load(path, weights_only=False)["optimizer"]
        assert [one["wd_mult"] for one in optimizer.get("optimizer", optimizer)["param_groups"]] == order


def test_weights_alone_where_they_are_asked_for(
    make_model: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(**LLAMA)
    old = trained(model, tmp_path / "old")
    words = [old, tmp_path / "new", "--hf-dir", model, "--llm-pp-layers", "1,3", "--weights-only"]
    assert main(["convert", "resplit", *map(str, words)]) == 0
    assert "weights only" in capsys.readouterr().out
    assert main(["convert", "hf-to-mm", str(model), str(tmp_path / "other"), "--weights-only"]) == 2
    assert "--weights-only requires resplit" in capsys.readouterr().err
    content = torch.load(tmp_path / "new" / "iter_0000003" / "mp_rank_00_000" / "model_optim_rng.pt", weights_only=True)
    assert "optimizer" not in content


@pytest.mark.parametrize(
    ("config", "spelling", "sizes", "reason"),
    [
        (MIXTRAL, Spelling(LOCAL, GROUPED), {}, "all experts of a rank lie in one tensor"),
        (MIXTRAL, None, {"expert_size": 2}, "experts have an optimizer of their own"),
        (LLAMA, Spelling(TRANSFORMER_ENGINE), {}, "--transformer-impl transformer_engine"),
        ({}, None, {}, "encoders have parameters in an order of their own"),
    ],
)
def test_state_that_cannot_follow_stays_with_a_reason(
    make_model: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    spelling: Spelling | None,
    sizes: dict[str, int],
    reason: str,
) -> None:
    model = make_model(**config)
    old = trained(model, tmp_path / "old")
    with caplog.at_level(logging.WARNING):
        assert not resplit(old, model, tmp_path / "new", layout(model, **sizes), spelling=spelling)
    assert reason in caplog.text and "--format torch_dist takes" in caplog.text


def test_settings_with_an_unknown_effect_on_places_are_refused(make_model: Make, tmp_path: Path) -> None:
    model = make_model(**LLAMA)
    overlapped = trained(model, tmp_path / "overlapped", distributed=True, overlap_grad_reduce=True)
    with pytest.raises(ConfigError, match=r"--overlap-grad-reduce.*--weights-only"):
        resplit(overlapped, model, tmp_path / "new", layout(model, SPLIT))
    assert not (tmp_path / "new").exists()
    grouped = trained(model, tmp_path / "grouped", num_groups=3)
    with pytest.raises(ConfigError, match=r"2 groups of parameters without weight decay"):
        resplit(grouped, model, tmp_path / "new", layout(model, SPLIT))
    assert not (tmp_path / "new").exists()


def test_a_vocabulary_of_other_padding_is_refused(make_model: Make, tmp_path: Path) -> None:
    model = make_model(**LLAMA)
    old = trained(model, tmp_path / "old")
    with pytest.raises(ConfigError, match=r"32 rows of the vocabulary, the new layout pads it to 40.*--weights-only"):
        resplit(old, model, tmp_path / "new", layout(model, SPLIT, vocab_multiple=20))
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 32
