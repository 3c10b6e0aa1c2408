"""The scoreboard: its arithmetic on rows whose answer is known."""

import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.analytic.spellings import canonical
from mindspeed_autoparallel.predict.measured_rows import request_of_row
from mindspeed_autoparallel.predict.predict import predict
from mindspeed_autoparallel.predict.scoreboard import rank_correlation, ranking_by_group, scoreboard

_ROW = {
    "group": "g",
    "model": {"type": "gpt", "num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "A100", "num_gpus": 8},
    "parallel": {"tp": 2, "pp": 2, "dp": 2},
    "train": {"gbs": 32, "mbs": 2, "recompute": "full"},
}


def test_rank_correlation_is_one_for_the_same_order_and_minus_one_for_the_reverse() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)


def test_regret_is_how_much_slower_the_chosen_plan_is_than_the_best() -> None:
    pairs = [(1.0, 110.0), (2.0, 120.0), (3.0, 130.0), (4.0, 100.0)]
    rows = [(_ROW, predicted, measured) for predicted, measured in pairs]
    ranking = ranking_by_group(rows)
    assert ranking["groups"] == 1
    assert ranking["mean_regret"] == pytest.approx(0.1)
    assert ranking["top3_hits"] == 0


def test_a_measured_time_twice_the_prediction_is_an_error_of_half() -> None:
    predicted = predict([_ROW])["predictions"][0]["step_time_ms"]
    result = scoreboard([{**_ROW, "measured": {"iter_time_ms": 2 * predicted}}])
    assert result["groups"]["g"]["step_time"]["mean_absolute"] == pytest.approx(0.5)
    assert result["groups"]["g"]["step_time"]["worst_under"] == pytest.approx(-0.5)


def test_rows_that_cannot_be_scored_are_counted_with_the_reason() -> None:
    unknown = {**_ROW, "hw": {"gpu": "Abacus", "num_gpus": 8}, "measured": {"iter_time_ms": 1.0}}
    result = scoreboard([unknown, {"group": "h", "measured": {}}])
    assert result["groups"] == {}
    assert sum(result["left_out"].values()) == 2
    assert any("Abacus" in reason for reason in result["left_out"])


def test_command_prints_json_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [{**_ROW, "measured": {"iter_time_ms": 500.0}}]}))
    assert main(["scoreboard", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"]["g"]["step_time"]["rows"] == 1
    assert main(["scoreboard", str(path)]) == 0
    assert "step time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": 5}, "model is 5, must be an object"),
        ({"measured": None}, "measured is None, must be an object"),
        ({"hw": []}, "hw is [], must be an object"),
        ({"megatron_args": None}, "megatron_args is None, must be an object"),
        ({"model": {**_ROW["model"], "config": 3}}, "model.config is 3, must be an object"),
        ({"hw": {"gpu": "A100", "num_gpus": "8"}}, "hw.num_gpus is '8', must be a whole number of at least 1."),
        ({"parallel": {"tp": 0}}, "parallel.tp is 0, must be a whole number of at least 1."),
        ({"train": {"gbs": "x"}}, "train.gbs is 'x', must be a whole number."),
        ({"hw": {"gpu": "Abacus", "num_gpus": 8}}, "unknown device 'Abacus'"),
    ],
)
def test_a_broken_row_is_left_out_with_its_reason_and_the_others_are_scored(change: dict, reason: str) -> None:
    measured = {"iter_time_ms": 550.0}
    result = scoreboard([{**_ROW, "measured": measured}, {**_ROW, "measured": measured, **change}])
    assert result["groups"]["g"]["step_time"]["rows"] == 1
    ((said, count),) = result["left_out"].items()
    assert said.startswith(f"g: {reason}")
    assert count == 1


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "NaN", -5, 0, True, [1], 10**299, 5e-324], ids=lambda value: str(value)[:5]
)
@pytest.mark.parametrize("key", ["step_time_ms", "tokens_per_s_per_gpu", "peak_gib", "activations_gib"])
def test_a_measured_figure_that_is_none_leaves_the_row_out_by_name(key: str, value: object) -> None:
    good = {**_ROW, "measured": {"iter_time_ms": 1.0}}
    result = scoreboard([good, {**_ROW, "measured": {"iter_time_ms": 1.0, key: value}}])
    assert result["groups"]["g"]["step_time"]["rows"] == 1
    ((said, count),) = result["left_out"].items()
    assert said.startswith(f"g: measured.{key} is ") and said.endswith("must be a number above 0")
    assert (count, len(said) < 200) == (1, True)


@pytest.mark.parametrize("key", ["activations_gib", "activation_pct_of_tp_baseline", "params_plus_optimizer_gib"])
def test_a_figure_that_is_null_was_not_measured(key: str) -> None:
    result = scoreboard([{**_ROW, "measured": {"iter_time_ms": 1.0, key: None}}])
    assert result["groups"]["g"]["step_time"]["rows"] == 1 and not result["left_out"]


def test_a_row_without_its_recompute_gets_the_least_that_fits() -> None:
    silent = {**_ROW, "train": {"gbs": 32, "mbs": 2}}
    assert request_of_row(silent)["train"]["recompute"] == "none"
    large = {"type": "gpt", "num_layers": 56, "hidden": 6144, "heads": 48, "seq": 2048}
    assert request_of_row({**silent, "model": large, "parallel": {"tp": 8}})["train"]["recompute"] == "selective"
    huge = {**large, "num_layers": 96, "hidden": 12288, "heads": 96}
    assert request_of_row({**silent, "model": huge})["train"]["recompute"] == "full"


def test_rows_with_megatron_flags_say_how_attention_and_loss_were_computed() -> None:
    def train(**flags: object) -> dict:
        names = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        return request_of_row({**_ROW, "megatron_args": {"--bf16": True, **names}})["train"]

    assert train()["attention"] == train(attention_backend="flash")["attention"] == "fused"
    assert train(attention_backend="unfused")["attention"] == train(transformer_impl="local")["attention"] == "unfused"
    assert not train(cross_entropy_loss_fusion=True)["cross_entropy_fusion"]
    assert train(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")["cross_entropy_fusion"]


@pytest.mark.parametrize("document", [{"rows": []}, {"rows": [1]}, {}, 5])
def test_the_command_names_what_the_file_must_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: object
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(document))
    assert main(["scoreboard", str(tmp_path / "rows.json")]) == 2
    assert 'must hold {"rows": [...]} with one object per measured run' in capsys.readouterr().err


def test_every_size_of_a_model_file_beside_a_row_is_read() -> None:
    config = {
        "hidden_size": 2048, "head_num": 16, "intermediate_size": 4096, "layer_num": 60, "vocab_size": 32000,
        "use_swiglu": True, "expert_num": 64, "topk": 6, "moe_ffn_hidden_size": 768, "dense_layers": 1,
        "sliding_window": 512,
    }  # fmt: skip
    request = request_of_row({**_ROW, "model": {"num_layers": 4, "seq": 4096, "config": config}})
    model = canonical({"model": request["model"]})["model"]
    expected = {"topk": 6, "num_experts": 64, "moe_ffn": 768, "num_dense_layers": 1, "window": 512, "num_layers": 4}
    assert {key: model[key] for key in expected} == expected
