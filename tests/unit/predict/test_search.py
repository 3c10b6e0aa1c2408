"""The search over layouts."""

import copy
import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.search import megatron_argv, search
from mindspeed_autoparallel.predict.space import candidates

_BASE = {
    "model": {"num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "A100", "num_gpus": 8},
    "parallel": {},
    "train": {"gbs": 32},
}


def test_the_first_of_the_top_is_the_fastest_of_all_that_fit() -> None:
    result = search(_BASE)
    times = [answer["step_time_ms"] for answer in map(predict_one, candidates(_BASE)) if answer["status"] == "ok"]
    assert [plan["step_time_ms"] for plan in result["top"]] == sorted(times)[:3]
    assert result["num_fitting"] == len(times)
    assert result["num_candidates"] == result["num_fitting"] + sum(result["left_out"].values())


def test_what_the_request_names_is_held() -> None:
    base = {**_BASE, "parallel": {"tp": 2}, "train": {"gbs": 32, "recompute": "full", "mbs": 2}}
    for plan in search(base)["top"]:
        assert plan["parallel"]["tp"] == 2
        assert plan["train"]["recompute"] == "full"
        assert plan["argv"][:2] == ["--tensor-model-parallel-size", "2"]


def test_the_flags_say_the_layout_in_megatrons_words() -> None:
    request = {**_BASE, "parallel": {"tp": 2, "pp": 2, "vpp": 3}, "train": {"gbs": 32, "mbs": 2, "recompute": "full"}}
    text = " ".join(megatron_argv(request))
    assert "--num-layers-per-virtual-pipeline-stage 4" in text
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in text


def test_the_flags_name_the_overlaps_that_a_prediction_rests_on() -> None:
    def flags(gpu: str, **train: object) -> set[str]:
        hardware, layout = {"gpu": gpu, "num_gpus": 8}, {"tp": 2, "pp": 2, "sp": True}
        argv = megatron_argv({**_BASE, "hw": hardware, "parallel": layout, "train": {"gbs": 32, "mbs": 2, **train}})
        return {"--overlap-grad-reduce", "--tp-comm-overlap"} & set(argv)

    assert flags("A100") == set()
    assert flags("H100") == {"--overlap-grad-reduce", "--tp-comm-overlap"}
    assert flags("H100", tp_comm_overlap=False) == {"--overlap-grad-reduce"}
    assert flags("A100", overlap_grad_reduce=True) == {"--overlap-grad-reduce"}


def test_experts_may_spread_over_nodes_where_there_are_many_and_the_flags_name_the_dispatcher() -> None:
    model = {**_BASE["model"], "type": "moe", "num_experts": 64, "topk": 4, "moe_ffn": 512, "swiglu": True}
    base = {"model": model, "hw": {"gpu": "H100", "num_gpus": 32}, "parallel": {"tp": 1, "pp": 1}, "train": {"gbs": 64}}
    sizes = {request["parallel"]["ep"] for request in candidates(base)}
    assert sizes == {1, 2, 4, 8, 16, 32}
    assert max(request["parallel"]["ep"] for request in candidates({**base, "model": {**model, "num_experts": 8}})) == 8
    near = megatron_argv({**base, "parallel": {"ep": 8}, "train": {"gbs": 64, "mbs": 1}})
    far = megatron_argv({**base, "parallel": {"ep": 32}, "train": {"gbs": 64, "mbs": 1, "moe_a2a_overlap": True}})
    assert near[near.index("--moe-token-dispatcher-type") + 1] == "alltoall"
    assert far[far.index("--moe-token-dispatcher-type") + 1] == "flex"
    assert "--overlap-moe-expert-parallel-comm" in far
    assert "--overlap-moe-expert-parallel-comm" not in near


def test_a_model_too_large_for_every_layout_is_infeasible_with_the_numbers() -> None:
    base = copy.deepcopy(_BASE)
    base["model"].update({"hidden": 16384, "heads": 128, "num_layers": 96})
    with pytest.raises(InfeasiblePlan, match=r"needs [\d.]+ GiB of"):
        search(base)
    base["model"]["num_layers"] = 94
    with pytest.raises(InfeasiblePlan, match="plan --profile-source analytic chooses layers and recompute stage"):
        search(base)


def test_a_batch_that_no_layout_can_split_is_bad_input_not_infeasible() -> None:
    base = {**_BASE, "parallel": {"tp": 1, "pp": 1}, "train": {"gbs": 7}}
    with pytest.raises(ConfigError, match="not a multiple"):
        search(base)


def test_command_prints_three_plans_and_fails_with_three_when_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(_BASE))
    assert main(["tune", "--request", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["top"]) == 3
    base = copy.deepcopy(_BASE)
    base["model"].update({"hidden": 16384, "heads": 128, "num_layers": 96})
    path.write_text(json.dumps(base))
    assert main(["tune", "--request", str(path)]) == 3


def test_a_search_by_prediction_says_that_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(_BASE))
    assert main(["tune", "--request", str(path), "--profile-source", "analytic"]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert main(["tune", "--request", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile_source"] == "analytic"


def test_experts_under_tensor_parallelism_are_written_with_their_own_tensor_size() -> None:
    request = {
        "model": {**_BASE["model"], "type": "moe", "num_experts": 8, "topk": 2},
        "hw": {"gpu": "H100", "num_gpus": 8},
        "parallel": {"tp": 2, "ep": 4, "etp": 1},
        "train": {"gbs": 32, "mbs": 2},
    }
    text = " ".join(megatron_argv(request))
    assert "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1" in text


def test_experts_are_tried_whole_and_split_over_tensor_ranks() -> None:
    base = {
        "model": {**_BASE["model"], "type": "moe", "num_experts": 8, "topk": 2},
        "hw": {"gpu": "H100", "num_gpus": 8},
        "parallel": {"tp": 2, "pp": 1},
        "train": {"gbs": 32, "mbs": 1, "recompute": "none"},
    }
    tried = {(request["parallel"]["ep"], request["parallel"]["etp"]) for request in candidates(base)}
    assert {(2, 1), (2, 2), (8, 1)} <= tried
    base["parallel"]["etp"] = 1
    assert {request["parallel"]["etp"] for request in candidates(base)} == {1}
