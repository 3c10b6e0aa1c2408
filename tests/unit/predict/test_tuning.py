"""``tune``: plan with a computed profile, for a request without a layout."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.cli._launch import MEGATRON, MINDSPEED_LLM, host_of, launch_flags
from mindspeed_autoparallel.cli._script import model_flags, write_script
from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.predict.megatron_arguments import model_of_arguments
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.tuning import Tuned, tune
from mindspeed_autoparallel.spec import Plan

_BASE: dict[str, Any] = {
    "model": {"num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "H100", "num_gpus": 8},
    "parallel": {},
    "train": {"gbs": 32},
}
_EXPERTS = {**_BASE["model"], "type": "moe", "num_experts": 64, "topk": 4, "moe_ffn": 512, "swiglu": True}


_BRIEF = SearchOptions(top_k=1, time_limit_s=1, num_workers=1, with_relaxations=False)


@functools.lru_cache(maxsize=1)
def _tuned() -> Tuned:
    return tune(_BASE)


def _flags(plan: Plan, host: str = MEGATRON) -> str:
    return " ".join(launch_flags(plan, host))


def test_three_answers_fastest_first_and_predict_has_the_same_price() -> None:
    tuned = _tuned()
    steps = [plan.step.total_us for plan in tuned.plans]
    assert len(steps) == 3 and steps == sorted(steps)
    for plan, request in zip(tuned.plans, tuned.requests, strict=True):
        answer = predict_one(request)
        assert answer["step_time_ms"] == pytest.approx(plan.step.total_us / 1e3, rel=1e-3)
        assert answer["peak_memory_gib"] * 2**30 == pytest.approx(max(r.peak_bytes for r in plan.memory), rel=1e-3)


def test_no_layout_that_predict_can_price_is_faster() -> None:
    best = _tuned().plans[0].step.total_us / 1e3
    switches = {"overlap_grad_reduce": True, "tp_comm_overlap": True, "cross_entropy_fusion": False}
    for tensor in (1, 2, 4):
        for pipeline in (1, 2, 4):
            for batch in (1, 2, 4):
                train = {"gbs": 32, "mbs": batch, "recompute": "none", **switches}
                answer = predict_one({**_BASE, "parallel": {"tp": tensor, "pp": pipeline}, "train": train})
                assert answer["status"] != "ok" or answer["step_time_ms"] >= best * 0.999


_ODD = {**_BASE["model"], "heads": 24, "kv_heads": 6, "hidden": 1536, "seq": 1536}


@pytest.mark.parametrize(
    "parallel, devices",
    [
        ({"vpp": 3}, 8),
        ({"pp": 2, "vpp": 6}, 8),
        ({"tp": 3}, 6),
        ({"cp": 2}, 8),
        ({"tp": 2, "sp": False}, 8),
        ({"dist_opt": False}, 8),
        ({"tp": 2, "sp": False, "dist_opt": False}, 8),
    ],
)
def test_odd_sizes_and_switches_that_are_off_are_held_and_priced(parallel: dict[str, Any], devices: int) -> None:
    hardware = {"gpu": "H100", "num_gpus": devices, "gpus_per_node": devices}
    tuned = tune({**_BASE, "model": _ODD, "hw": hardware, "parallel": parallel, "train": {"gbs": 48}}, options=_BRIEF)
    for plan, request in zip(tuned.plans, tuned.requests, strict=True):
        assert {key: request["parallel"][key] for key in parallel} == parallel
        answer, flags = predict_one(request), _flags(plan)
        assert answer["step_time_ms"] == pytest.approx(plan.step.total_us / 1e3, rel=1e-3)
        assert ("--sequence-parallel" in flags) == bool(request["parallel"]["sp"])
        assert ("--use-distributed-optimizer" in flags) == request["parallel"]["dist_opt"]


@pytest.mark.parametrize("rate", ["fast", -3, float("nan"), [200]])
def test_a_network_rate_that_is_none_is_refused_in_one_line(rate: object) -> None:
    with pytest.raises(ConfigError, match=r"hw.inter_node_gbps is .*, must be a number above 0\."):
        tune({**_BASE, "hw": {**_BASE["hw"], "inter_node_gbps": rate}})


@pytest.mark.parametrize("key, value", [("microbatch_group_size", 6), ("cp_type", "ulysses"), ("fsdp", True)])
def test_settings_that_tune_does_not_search_with_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"parallel.{key} is .*use predict"):
        tune({**_BASE, "parallel": {"tp": 2, key: value}})
    with pytest.raises(ConfigError, match="schedule is 'gpipe'"):
        tune({**_BASE, "parallel": {"schedule": "gpipe"}})
    with pytest.raises(ConfigError, match=r"TP 3 x PP 1 x CP 1 = 3 does not divide 8 devices"):
        tune({**_BASE, "parallel": {"tp": 3}})
    hardware = {"gpu": "H100", "num_gpus": 6, "gpus_per_node": 6}
    with pytest.raises(ConfigError, match=r"TP 3 does not divide the 1024 tokens"):
        tune({**_BASE, "model": {**_ODD, "seq": 1024}, "hw": hardware, "parallel": {"tp": 3}})


def test_unknown_keys_are_noted_in_every_section() -> None:
    base = {**_BASE, "parallel": {"tp": 1, "pp": 1, "tpp": 4}, "train": {"gbs": 32, "lr": 1, "wd": 2}}
    for answer in tune(base, options=_BRIEF).answers:
        assert {f"{key}: unknown; ignored" for key in ("parallel.tpp", "train.lr", "train.wd")} <= set(answer["notes"])


@pytest.mark.slow
def test_sizes_that_the_request_names_are_held() -> None:
    base = {**_BASE, "parallel": {"tp": 2, "pp": 2}, "train": {"gbs": 32, "recompute": "none", "mbs": 2}}
    for plan in tune(base, options=_BRIEF).plans:
        assert (plan.layout.tensor_size, plan.layout.pipeline_size, plan.layout.micro_batch_size) == (2, 2, 2)
        assert not any(plan.recomputed_of("text_decoder", kind)[0] for kind in ("selective", "full"))
        assert "--tensor-model-parallel-size 2" in _flags(plan)


def test_a_placement_is_for_predict() -> None:
    with pytest.raises(ConfigError, match=r"parallel.pipeline_layout places the layers"):
        tune({**_BASE, "parallel": {"pp": 2, "pipeline_layout": "Et*12|t*12L"}})


def test_the_switches_that_a_price_rests_on_are_among_the_flags() -> None:
    def flags(gpu: str, model: dict[str, Any] = _BASE["model"], **train: object) -> str:
        parallel = {"tp": 2, "pp": 1}
        base = {**_BASE, "model": model, "hw": {"gpu": gpu, "num_gpus": 8}, "parallel": parallel}
        plan = tune({**base, "train": {"gbs": 32, "mbs": 2, **train}}, options=_BRIEF).plans[0]
        return _flags(plan, host_of(plan))

    assert "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap" in flags("H100")
    assert "--tp-comm-overlap" not in flags("H100", tp_comm_overlap=False)
    assert "--overlap-grad-reduce" not in flags("H100", overlap_grad_reduce=False)
    # Megatron refuses it beside experts, and MindSpeed has no such flag.
    assert "--tp-comm-overlap" not in flags("H100", _EXPERTS)
    assert "--tp-comm-overlap" not in flags("910B")


def test_experts_may_spread_over_nodes_and_no_vendor_gets_anothers_dispatcher() -> None:
    def plan(gpu: str, expert: int) -> Plan:
        hardware = {"gpu": gpu, "num_gpus": 32}
        base = {"model": _EXPERTS, "hw": hardware, "parallel": {"tp": 1, "pp": 1, "ep": expert}}
        return tune({**base, "train": {"gbs": 64, "mbs": 1}}, options=_BRIEF).plans[0]

    assert "--moe-token-dispatcher-type alltoall" in _flags(plan("H100", 8))
    assert "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep" in _flags(plan("H100", 32))
    far = plan("910B", 32)
    assert host_of(far) == MINDSPEED_LLM
    assert "--moe-token-dispatcher-type alltoall" in _flags(far, MINDSPEED_LLM)


def test_layers_that_do_not_split_evenly_are_placed_in_the_hosts_words() -> None:
    model = {**_BASE["model"], "num_layers": 13}
    for gpu, host, flag in (
        ("H100", MEGATRON, "--pipeline-model-parallel-layout"),
        ("910B", MINDSPEED_LLM, "--num-layer-list"),
    ):
        base = {**_BASE, "model": model, "hw": {"gpu": gpu, "num_gpus": 8}, "parallel": {"pp": 4, "vpp": 1}}
        assert flag in _flags(tune(base, options=_BRIEF).plans[0], host)


def test_a_model_too_large_for_every_layout_is_infeasible_with_the_numbers() -> None:
    base = copy.deepcopy(_BASE)
    base["model"].update({"hidden": 16384, "heads": 128, "num_layers": 96})
    base |= {"parallel": {"tp": 8, "pp": 1}, "train": {"gbs": 32, "mbs": 1}}
    with pytest.raises(InfeasiblePlan, match=r"GiB"):
        tune(base)


def test_a_batch_that_no_layout_can_split_is_bad_input_not_infeasible() -> None:
    with pytest.raises(ConfigError, match="7 is not divisible by"):
        tune({**_BASE, "parallel": {"tp": 1, "pp": 1}, "train": {"gbs": 7}})


def test_command_prints_three_plans_and_fails_with_three_when_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(_BASE))
    assert main(["tune", "--request", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["top"]) == 3 and document["profile_source"] == "analytic"
    assert main(["tune", "--request", str(path), "--profile-source", "analytic"]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    base = copy.deepcopy(_BASE)
    base["model"].update({"hidden": 16384, "heads": 128, "num_layers": 96})
    base |= {"parallel": {"tp": 8, "pp": 1}, "train": {"gbs": 32, "mbs": 1}}
    path.write_text(json.dumps(base))
    assert main(["tune", "--request", str(path)]) == 3


def _handed_to_torchrun(script: Path) -> list[str]:
    (script.parent / "torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (script.parent / "torchrun").chmod(0o755)
    environment = {"PATH": f"{script.parent}:{os.environ['PATH']}"}
    words = subprocess.run(["bash", str(script), "--lr", "1"], env=environment, capture_output=True, check=True).stdout
    return words.decode().splitlines()


def test_a_script_has_the_layout_or_the_plan_where_no_flags_describe_it(tmp_path: Path) -> None:
    plan, shape = _tuned().plans[0], _BASE["model"]
    folder = tmp_path / "a folder 'of' mine"
    folder.mkdir()
    write_script(plan, folder / "launch.sh", shape)
    words = _handed_to_torchrun(folder / "launch.sh")
    assert " ".join([*launch_flags(plan, MEGATRON), "--lr", "1"]) in " ".join(words)
    assert not list(folder.glob("*.json"))
    other = replace(plan, layout=replace(plan.layout, schedule="gpipe"), model=replace(plan.model, name="x\nrm -r y"))
    write_script(other, folder / "launch.sh", None)
    words = _handed_to_torchrun(folder / "launch.sh")
    assert words[words.index("--auto-parallel-plan") + 1] == str(folder / "launch.plan.json")
    assert (folder / "launch.plan.json").read_text() == other.text()


def test_flags_of_a_model_are_read_back_as_the_same_model() -> None:
    for shape in (_BASE["model"], {**_EXPERTS, "shared_expert_ffn": 64, "kv_heads": 4, "mtp_layers": 1}):
        words = model_flags(shape, MEGATRON)
        assert words is not None
        values: dict[str, object] = {}
        for word, following in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--"):
                name = word.removeprefix("--").replace("-", "_")
                values[name] = True if following.startswith("--") else int(following)
        found = model_of_arguments(values)
        assert {key: found.get(key) for key in shape if key not in ("vocab", "type")} == {
            key: value for key, value in shape.items() if key not in ("vocab", "type")
        }
    assert model_flags({**_BASE["model"], "mla": {"kv_lora_rank": 512}}, MEGATRON) is None


def test_a_script_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(_BASE))
    assert main(["tune", "--request", str(path), "--script", str(tmp_path / "none" / "launch.sh")]) == 2
    assert "a folder that exists" in capsys.readouterr().err


_SMALL = {"num_layers": 8, "hidden": 1024, "heads": 16, "ffn": 4096, "seq": 2048, "vocab": 32000, "type": "gpt"}


def test_sequence_parallelism_that_is_on_counts_where_tensors_are_split() -> None:
    for size in (1, 2):
        tuned = tune({**_BASE, "model": _SMALL, "parallel": {"tp": size, "sp": True}}, options=_BRIEF)
        assert {plan.layout.sequence_parallel for plan in tuned.plans} == {size > 1}


def test_layouts_with_stages_are_illegal_where_activations_are_offloaded() -> None:
    base = {**_BASE, "model": _SMALL, "train": {**_BASE["train"], "cpu_offloading_num_layers": 2}}
    tuned = tune({**base, "parallel": {}}, options=_BRIEF)
    assert {plan.layout.pipeline_size for plan in tuned.plans} == {1}
    with pytest.raises(ConfigError, match="cpu_offloading_num_layers 2 with PP 2"):
        tune({**base, "parallel": {"pp": 2}}, options=_BRIEF)


def test_the_request_of_a_plan_places_the_layers_of_an_encoder() -> None:
    encoder = {"num_layers": 12, "hidden": 512, "heads": 8, "ffn": 2048, "tokens_per_sample": 1024}
    tuned = tune({**_BASE, "model": {**_SMALL, "vision_encoder": encoder}, "parallel": {"pp": 2}}, options=_BRIEF)
    for plan, request, answer in zip(tuned.plans, tuned.requests, tuned.answers, strict=True):
        assert request["model"]["vision_encoder"]["pipeline_num_layers"] == list(plan.layers_of("encoder"))
        assert answer["step_time_ms"] == pytest.approx(plan.step.total_us / 1e3, rel=1e-3)


def test_the_files_of_all_tuned_plans_can_be_read() -> None:
    for plan in tune({**_BASE, "model": _SMALL, "parallel": {"pp": 4}}, options=_BRIEF).plans:
        assert Plan.parse(json.loads(plan.text())) == plan
