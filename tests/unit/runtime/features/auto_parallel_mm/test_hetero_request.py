"""A request for a hetero search: refused before anything is measured, or written to a separate model.json."""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.data.distribution import DataSource, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan, PlanError
from mindspeed_autoparallel.planner import wanted
from mindspeed_autoparallel.planner.hetero import choice_search
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver
from mindspeed_autoparallel.planner.hetero.compare import Comparison
from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.profiles import BlockCost, Collective, LinkTier
from mindspeed_autoparallel.runtime import state
from mindspeed_autoparallel.runtime.features.apply_plan.applicable import refusal
from mindspeed_autoparallel.runtime.features.apply_plan.check import MeasuredRank, comparison, predicted_us
from mindspeed_autoparallel.runtime.features.apply_plan.entry import prepare
from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import (
    hetero_model,
    training_flags,
    write_hetero_model,
)
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import read_request
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.search import search
from mindspeed_autoparallel.runtime.hetero.layouts import read_layout
from mindspeed_autoparallel.runtime.megatron import features
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.spec import Cluster, Plan

MODEL: dict[str, Any] = {
    "image_encoder": {
        "vision_encoder": {"num_layers": 2, "num_attention_heads": 4, "pipeline_num_layers": [2, 0], "tp": 8},
        "vision_projector": {"num_layers": 1},
    },
    "text_decoder": {"num_layers": 4, "num_attention_heads": 4, "recompute_granularity": "full"},
}


def model_file(folder: Path, content: Any = MODEL) -> Path:
    path = folder / "model.json"
    path.write_text(json.dumps(content))
    return path


def asked(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "mm_model": str(tmp_path / "model.json"),
        "node_rank": 0,
        "nnodes": 1,
        "nproc_per_node": 2,
        "simulated_nnodes": 1,
        "simulated_nproc_per_node": 4,
        "global_batch_size": 8,
        "master_addr": "localhost",
        "master_port": 6000,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "use_distributed_optimizer": True,
        "micro_batch_size": 1,
        "auto_parallel_work_dir": str(tmp_path / "work"),
        "auto_parallel_memory_limit_mib": None,
        "auto_parallel_time_limit_s": 10.0,
        "auto_parallel_launch_timeout_s": 10.0,
        "auto_parallel_profile_file": None,
        "auto_parallel_hetero": True,
        "hetero_balance": "global",
        "num_layers": 4,
    }
    return argparse.Namespace(**{**values, **changes})


def test_balance_of_the_training_is_planned_with(tmp_path: Path) -> None:
    model_file(tmp_path)
    assert read_request(asked(tmp_path)).hetero_balance == "global"
    assert read_request(asked(tmp_path, auto_parallel_hetero=False)).hetero_balance is None


@pytest.mark.parametrize(
    "name", ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
)
def test_script_sizes_other_than_one_are_refused_before_measuring(tmp_path: Path, name: str) -> None:
    model_file(tmp_path)
    with pytest.raises(ConfigError, match="takes tp/pp/cp from model"):
        read_request(asked(tmp_path, **{name: 2}))
    assert not (tmp_path / "work").exists()


def test_a_model_without_an_encoder_is_refused_before_measuring(tmp_path: Path) -> None:
    model_file(tmp_path, {"text_decoder": MODEL["text_decoder"]})
    with pytest.raises(ConfigError, match=r"needs an encoder besides the backbone.*only text_decoder"):
        read_request(asked(tmp_path))
    assert not (tmp_path / "work").exists()


def with_samples(tmp_path: Path) -> argparse.Namespace:
    model_file(tmp_path)
    samples = [SampleSize(tokens=tokens, images=1, patches=16, squared_patches=256) for tokens in [16] * 9 + [64]]
    source = DataSource(
        kind="lengths", files=("x",), sha256="abc", tokens_by="given", num_records=len(samples), num_read=len(samples)
    )
    make_distribution(source, samples).write(tmp_path / "samples.json")
    return asked(tmp_path, auto_parallel_data=str(tmp_path / "samples.json"), overlap_grad_reduce=True)


def test_both_kinds_of_plan_for_samples_have_the_scripts_switches(tmp_path: Path) -> None:
    arguments = with_samples(tmp_path)
    found = search(read_request(arguments), small_profile(capacity_mib=4000), arguments)
    assert isinstance(found, Comparison) and found.homogeneous is not None
    assert found.hetero.data is not None and found.homogeneous.data is not None
    assert found.homogeneous.layout.overlap_gradient_reduce and found.hetero.layout.overlap_gradient_reduce


@pytest.mark.parametrize("samples", [True, False])
def test_the_best_plan_without_hetero_layouts_is_kept_where_none_with_them_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    def search_hetero(*_: Any, **__: Any) -> None:
        raise InfeasiblePlan("no hetero plan fits in 9 MiB.")

    model_file(tmp_path)
    monkeypatch.setattr(wanted, "search_hetero", search_hetero)
    arguments = with_samples(tmp_path) if samples else asked(tmp_path)
    found = search(read_request(arguments), small_profile(capacity_mib=4000), arguments)
    assert isinstance(found, Plan) and found.hetero is None


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search_hetero(small_profile(capacity_mib=330), Cluster(num_nodes=1, devices_per_node=4), 8)


def test_written_model_has_the_plan_sizes_and_nothing_of_the_old_layout(tmp_path: Path, plan: Plan) -> None:
    user = model_file(tmp_path)
    before = user.read_bytes()
    description = describe(argparse.Namespace(mm_model=str(user)))
    path = write_hetero_model(plan, description, tmp_path / "elsewhere")
    assert (path.parent, user.read_bytes()) == (tmp_path, before)
    assert write_hetero_model(plan, description, tmp_path / "elsewhere") == path, "the same plan, the same file"
    content = json.loads(path.read_text())
    own = plan.layout.modules["image_encoder"]
    vision, text = content["image_encoder"]["vision_encoder"], content["text_decoder"]
    mbs = own.micro_batch_scale * plan.layout.micro_batch_size
    sizes = {"tp": own.tensor_size, "pp": 1, "cp": 1, "mbs": mbs}
    assert (vision, {name: content["image_encoder"][name] for name in sizes}) == (
        {"num_layers": 2, "num_attention_heads": 4},
        sizes,
    )
    assert text["pipeline_num_layers"] == list(plan.layers_of("text_decoder"))
    assert text["mbs"] == plan.layout.micro_batch_size
    layout = read_layout(content, world_size=4)
    assert layout.encoders[0].tensor_size == own.tensor_size
    assert (layout.backbone.tensor_size, layout.backbone.pipeline_size) == (
        plan.layout.tensor_size,
        plan.layout.pipeline_size,
    )
    flags = training_flags(plan, path, description)
    assert flags.startswith(f"--hetero-parallel --mm-model {path} --global-batch-size 8")
    assert plan.hetero is not None
    assert ("--hetero-memory recompute" in flags) == (plan.hetero.memory == "recompute")


def test_the_file_for_mindspeed_mm_keeps_its_adapter_and_names_the_flag_that_is_ours_there(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file keeps an adapter that is named on the encoder as a whole, and leaves the host's own hetero
    parallel off."""
    words = {"adapter": "mindspeed_autoparallel.runtime.hetero.adapters.mindspeed_mm:ImageEncoder"}
    for place in ("image_encoder", "vision_encoder"):
        content = copy.deepcopy(MODEL)
        whole = content["image_encoder"]
        (whole if place == "image_encoder" else whole[place])["hetero"] = words
        description = describe(argparse.Namespace(mm_model=str(model_file(tmp_path, content))))
        path = write_hetero_model(plan, description, tmp_path)
        (encoder,) = read_layout(json.loads(path.read_text()), world_size=4).encoders
        assert (encoder.adapter, encoder.tensor_size) == (
            words["adapter"],
            plan.layout.modules["image_encoder"].tensor_size,
        )
        assert training_flags(plan, path, description).startswith("--auto-parallel-hetero --mm-model")
    description = describe(argparse.Namespace(mm_model=str(model_file(tmp_path))))
    parses = features.Parses()
    parses.flags_of_host = frozenset({"--hetero-parallel"})
    monkeypatch.setitem(state._INSTANCES, features.Parses, parses)
    assert training_flags(plan, path, description).startswith("--auto-parallel-hetero --mm-model")


def test_a_read_only_folder_gets_the_file_elsewhere(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspeed_autoparallel.runtime.features.apply_plan import hetero_model as module

    user = model_file(tmp_path)
    written = module.write_json_atomic

    def refuse(path: Path, value: Any) -> None:
        if path.parent == tmp_path:
            raise ConfigError("read-only")
        written(path, value)

    monkeypatch.setattr(module, "write_json_atomic", refuse)
    description = describe(argparse.Namespace(mm_model=str(user)))
    path = write_hetero_model(plan, description, tmp_path / "elsewhere")
    assert path.parent == tmp_path / "elsewhere"
    assert path.exists()


def test_a_model_with_other_layers_than_the_plan_is_refused(tmp_path: Path, plan: Plan) -> None:
    other = copy.deepcopy(MODEL)
    other["text_decoder"]["num_layers"] = 6
    description = describe(argparse.Namespace(mm_model=str(model_file(tmp_path, other))))
    with pytest.raises(ConfigError, match=r"'text_decoder': 6.*the plan is for.*'text_decoder': 4"):
        hetero_model(plan, description)


def _light_selective(_: str, layer: BlockCost) -> BlockCost:
    """Half of the activations for a tenth of the time of full recompute."""
    none, full = layer.recompute["none"], layer.recompute["full"]
    light = replace(full, saved_bytes=none.saved_bytes // 2, extra_backward_us=full.extra_backward_us / 10)
    return replace(layer, recompute={"none": none, "selective": light, "full": full})


@pytest.mark.parametrize("samples", [False, True])
def test_both_kinds_of_plan_recompute_what_model_json_can_give(tmp_path: Path, samples: bool) -> None:
    """No key of model.json holds layers of several kinds: the search must not choose such a plan."""
    model_file(tmp_path)
    arguments = with_samples(tmp_path) if samples else asked(tmp_path)
    profile = small_profile(capacity_mib=240 if samples else 180)
    measurements = tuple(
        replace(one, modules={name: cost.with_layers(_light_selective) for name, cost in one.modules.items()})
        for one in profile.measurements
    )
    request = read_request(arguments)
    found = search(request, replace(profile, measurements=measurements), arguments)
    assert isinstance(found, Comparison) and found.homogeneous is not None
    for plan in (found.hetero, found.homogeneous):
        assert not refusal(plan, request.description, arguments, tmp_path)
        assert samples or "recomputed whole" in plan.search.scope


def test_encoders_windows_are_tried_beside_a_split_of_the_tight_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first solve that runs out of time leaves its split to the tight search; this ended in a StopIteration."""
    solve = BackboneSolver.solve

    def out_of_time(solver: BackboneSolver, reserved: Any, time_limit_s: float) -> Any:
        return replace(solve(solver, reserved, time_limit_s), lower_bound_us=0.0)

    def tight(solver: BackboneSolver, *_: Any) -> Any:
        found = next(result for _, result in solver.solved if result.evaluation is not None)
        return replace(found, lower_bound_us=found.evaluation.step_us)

    monkeypatch.setattr(BackboneSolver, "solve", out_of_time)
    monkeypatch.setattr(choice_search, "search_tight", tight)
    model_file(tmp_path)
    arguments = asked(tmp_path)
    assert isinstance(search(read_request(arguments), small_profile(capacity_mib=180), arguments), Comparison)


_ENDS_AT_A_CHECKPOINT: dict[str, Any] = {
    "save": "out",
    "ckpt_format": "torch_dist",
    "mtp_num_layers": 1,
    "untie_embeddings_and_output_weights": False,
}


def test_a_plan_that_its_training_would_refuse_is_not_written(tmp_path: Path) -> None:
    model_file(tmp_path)
    arguments = asked(tmp_path, auto_parallel_hetero=False, **_ENDS_AT_A_CHECKPOINT)
    with pytest.raises(PlanError, match=r"is not written, for the host refuses it: the plan has \d stages, .* --save"):
        search(read_request(arguments), small_profile(capacity_mib=150), arguments)


def test_where_stages_are_refused_the_best_plan_of_one_is_searched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_file(tmp_path)
    profile = small_profile()
    slow = LinkTier(default=Collective(latency_us=5.0, bytes_per_s=1e9))  # so that stages are best
    profile = replace(profile, device=replace(profile.device, intra=slow, inter=slow))
    sizes = []
    for given in ({}, _ENDS_AT_A_CHECKPOINT):
        arguments = asked(tmp_path, auto_parallel_hetero=False, **given)
        plan = search(read_request(arguments), profile, arguments)
        assert isinstance(plan, Plan)
        sizes.append(plan.layout.pipeline_size)
    assert sizes[0] > 1 and sizes[1] == 1
    assert "this is the best of one stage: the plan has" in caplog.text


@pytest.mark.parametrize(
    ("refused", "kept"), [({"use_torch_fsdp2": True}, "homogeneous"), (_ENDS_AT_A_CHECKPOINT, "hetero")]
)
def test_the_plan_that_its_training_accepts_is_kept_of_two(tmp_path: Path, refused: dict[str, Any], kept: str) -> None:
    model_file(tmp_path)
    request, profile = read_request(asked(tmp_path)), small_profile(capacity_mib=150)
    found = search(request, profile, asked(tmp_path, **refused))
    if kept == "hetero":
        assert isinstance(found, Comparison) and found.homogeneous is None
        assert found.hetero.hetero is not None and "the plan has" in found.hetero.hetero.homogeneous_note
    else:
        assert isinstance(found, Plan) and found.hetero is None and found.hetero_rival is None


def test_applying_a_hetero_plan_writes_its_sizes_and_switches_hetero_parallel_on(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model_file(tmp_path)
    plan.write(tmp_path / "hetero_plan.json")
    arguments = asked(tmp_path, auto_parallel_plan=str(tmp_path / "hetero_plan.json"), auto_parallel_check_steps=5)
    arguments.auto_parallel_hetero = False
    prepare(arguments)
    assert arguments.auto_parallel_hetero
    assert read_layout(json.loads(Path(arguments.mm_model).read_text()), world_size=4).encoders
    assert (arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size) == (1, 1)
    assert plan.hetero is not None
    assert (arguments.hetero_memory, arguments.hetero_balance) == (plan.hetero.memory, "local")
    assert (arguments.global_batch_size, arguments.micro_batch_size) == (8, plan.layout.micro_batch_size)


def test_phases_of_a_hetero_training_stand_beside_those_of_its_plan(plan: Plan) -> None:
    assert plan.hetero is not None
    predicted = predicted_us(plan)
    assert sum(predicted.values()) == pytest.approx(
        plan.step.total_us - plan.step.optimizer_us - sum(phase.optimizer_us for phase in plan.hetero.encoders)
    )
    ranks: list[MeasuredRank] = [
        {
            "step_us": 1.0,
            "step_spread": 0.0,
            "peak_bytes": 1,
            "steps_us": [1.0],
            "phase_us": dict.fromkeys(predicted, 1000.0 * rank),
        }
        for rank in (1, 2, 3, 4)
    ]
    text = comparison(plan, ranks)
    (line,) = [line for line in text.splitlines() if line.startswith("image_encoder forward")]
    assert line.split()[-2:] == [f"{plan.hetero.encoders[0].forward_us / 1000:.1f}", "4.0"]
