"""The prediction command."""

import copy
import json
import time
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.predict import price
from mindspeed_autoparallel.predict.predict import predict

_REQUEST = {
    "id": "a",
    "model": {"type": "gpt", "num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "A100-80GB", "num_gpus": 8, "gpus_per_node": 8},
    "parallel": {"tp": 2, "pp": 2},
    "train": {"gbs": 32, "mbs": 2, "recompute": "full"},
}


def _file(folder: Path, *requests: object) -> Path:
    path = folder / "requests.json"
    path.write_text(json.dumps({"requests": list(requests)}))
    return path


def test_command_prints_one_json_document_with_an_answer_per_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {**_REQUEST, "id": "b", "hw": {"gpu": "Abacus", "num_gpus": 8}}
    assert main(["predict", "--request", str(_file(tmp_path, _REQUEST, bad, "nonsense")), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["predictions"]
    assert [answer["status"] for answer in answers] == ["ok", "error", "error"]
    assert answers[0]["id"] == "a"
    assert answers[0]["step_time_interval_ms"][0] < answers[0]["step_time_ms"] < answers[0]["step_time_interval_ms"][1]
    assert len(answers[0]["stages"]) == 2
    assert answers[0]["peak_memory_gib"] == max(stage["peak_memory_gib"] for stage in answers[0]["stages"])
    assert "unknown device 'Abacus'" in answers[1]["reason"]


def test_requests_without_any_answer_are_bad_input_and_each_has_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {**_REQUEST, "hw": {"gpu": "Abacus", "num_gpus": 8}}
    assert main(["predict", "--request", str(_file(tmp_path, bad, "nonsense")), "--json"]) == 2
    printed = capsys.readouterr()
    assert [answer["status"] for answer in json.loads(printed.out)["predictions"]] == ["error", "error"]
    assert "none of 2 requests" in printed.err
    assert main(["predict", "--request", str(_file(tmp_path)), "--json"]) == 0


def test_a_layout_that_does_not_fit_names_the_stage_and_the_excess() -> None:
    request = copy.deepcopy(_REQUEST)
    request["model"] = {"type": "gpt", "num_layers": 96, "hidden": 12288, "heads": 96, "seq": 2048}
    answer = predict([request])["predictions"][0]
    assert answer["status"] == "out_of_memory"
    assert "stage 0 needs" in answer["reason"]
    assert answer["step_time_ms"] > 0


def test_experts_split_over_more_ranks_take_less_memory() -> None:
    request = copy.deepcopy(_REQUEST)
    request["model"].update({"type": "moe", "num_experts": 8, "topk": 2, "moe_ffn": 4096, "swiglu": True})
    request["hw"]["gpu"] = "H100"
    split = copy.deepcopy(request)
    split["parallel"]["ep"] = 2
    whole, shared = predict([request, split])["predictions"]
    assert shared["peak_memory_gib"] < whole["peak_memory_gib"]


def test_fifteen_hundred_requests_are_answered_well_within_a_minute() -> None:
    started = time.process_time()
    answers = predict([_REQUEST] * 1500)["predictions"]
    assert len(answers) == 1500
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    ("pipeline", "virtual", "batch"), [(1, 1, 40), (2, 1, 100), (2, 2, 96), (4, 1, 67), (4, 3, 116), (8, 1, 130)]
)
def test_the_steady_part_of_a_step_is_multiplied_as_if_all_of_it_were_simulated(
    pipeline: int, virtual: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = {"tp": 1, "pp": pipeline, "dp": 1, **({"vpp": virtual} if virtual > 1 else {})}
    hardware = {"gpu": "A100-80GB", "num_gpus": pipeline, "gpus_per_node": 8}
    train = {"gbs": batch, "mbs": 1, "recompute": "none"}
    request = {**_REQUEST, "parallel": parallel, "hw": hardware, "train": train}
    short = predict([request])["predictions"][0]
    monkeypatch.setattr(price, "_ROUNDS", 10_000)
    whole = predict([request])["predictions"][0]
    for key in ("step_time_ms", "bubble_fraction", "peak_memory_gib", "tokens_per_s_per_device"):
        assert short[key] == pytest.approx(whole[key], rel=1e-9)


def test_a_file_that_is_no_request_file_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.json"
    path.write_text("{}")
    assert main(["predict", "--request", str(path), "--json"]) == 2
    assert "requests" in capsys.readouterr().err


def test_the_interval_is_wider_for_shapes_and_sizes_that_were_never_measured() -> None:
    far = copy.deepcopy(_REQUEST)
    far["model"].update({"hidden": 5120, "heads": 40})
    known, unknown = predict([_REQUEST, far])["predictions"]

    def width(answer: dict) -> float:
        return answer["step_time_interval_ms"][1] / answer["step_time_ms"]

    assert width(unknown) > width(known)


_MIXTRAL = {
    "id": "mixtral-8x22b",
    "model": {
        "type": "moe",
        "num_layers": 56,
        "hidden": 6144,
        "heads": 48,
        "kv_heads": 8,
        "ffn": 16384,
        "seq": 4096,
        "vocab": 32000,
        "swiglu": True,
        "num_experts": 8,
        "topk": 2,
    },
    "hw": {"gpu": "H100", "num_gpus": 128, "gpus_per_node": 8},
    "parallel": {"tp": 2, "pp": 8, "ep": 8, "sp": True, "dist_opt": True},
    "train": {"gbs": 256, "mbs": 1, "recompute": "none"},
}


def test_peak_of_a_published_mixtral_run_is_within_five_percent() -> None:
    # Megatron-LM mixtral_8x22b_tp2pp8ep8 on H100: 26.57 GiB on the last rank; 26.23 on A100 with the release before.
    peak = predict([_MIXTRAL])["predictions"][0]["stages"][-1]["peak_memory_gib"]
    assert abs(peak / 26.57 - 1) < 0.05
    assert abs(peak / 26.23 - 1) < 0.05


def test_whole_experts_on_tensor_ranks_hold_the_same_weights_as_split_ones_on_fewer_expert_ranks() -> None:
    def answer(**parallel: int) -> dict:
        request = copy.deepcopy(_MIXTRAL)
        request["parallel"].update(parallel)
        return predict([request])["predictions"][0]

    split, whole = answer(ep=4, etp=2), answer(ep=8, etp=1)
    assert split["stages"][0]["parameters_gib"] == whole["stages"][0]["parameters_gib"]
    assert split["step_time_ms"] != whole["step_time_ms"]
    assert "ETP 3" in answer(etp=3)["reason"]


def test_left_out_ffn_is_what_megatron_takes() -> None:
    def parameters(**model: object) -> float:
        request = copy.deepcopy(_REQUEST)
        request["model"].update(model)
        return predict([request])["predictions"][0]["stages"][0]["parameters_gib"]

    assert parameters() == parameters(ffn=8192)
    assert parameters(swiglu=True) == parameters(swiglu=True, ffn=5440)
