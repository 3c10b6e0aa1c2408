"""Planning from shapes and the device catalogue, with no accelerator and nothing measured."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from exit_codes import exit_code

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile
from mindspeed_autoparallel.predict.model_file import Section, read_model_file
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.spec import Cluster, Layout

_MODEL = {
    "type": "gpt",
    "num_layers": 16,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "seq": 4096,
    "vocab": 128256,
    "swiglu": True,
}
_PLAN = ["plan", "--nnodes", "2", "--nproc-per-node", "8", "--global-batch-size", "32", "--time-limit-s", "20"]


def _file(folder: Path, content: object) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(content))
    return str(path)


def _analytic(folder: Path, content: object = _MODEL) -> list[str]:
    return [*_PLAN, "--profile-source", "analytic", "--model", _file(folder, content), "--device", "H100"]


def test_a_plan_without_any_profile_is_found_and_notes_that_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_analytic(tmp_path)) == 0
    printed = capsys.readouterr()
    assert "nothing was measured" in printed.out
    assert "H100" in printed.out
    assert "flags of megatron-lm: --" in printed.out
    (shown,) = re.findall(r"none below (\S+) ms", printed.err.splitlines()[-1])
    assert main([*_analytic(tmp_path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # The last line of progress has the bound of the answer.
    assert float(shown) == pytest.approx(plan["search"]["lower_bound_us"] / 1e3, abs=0.006)
    assert plan["profile"]["source"] == "analytic"
    assert any("nothing was measured" in note for note in plan["profile"]["notes"])
    assert plan["model"]["num_parameters"] == pytest.approx(4.54e9, rel=0.01)


_EXPERTS = {**_MODEL, "type": "moe", "num_experts": 8, "topk": 2, "moe_ffn": 2048}
_KINDS_OF_MODELS = {
    "plain": _MODEL,
    "tied": {**_MODEL, "tied_embeddings": True},
    "leading dense layers": {**_EXPERTS, "num_dense_layers": 3},
    "experts every second layer": {**_EXPERTS, "moe_layer_freq": 2},
    "multi-token prediction": {**_EXPERTS, "num_dense_layers": 3, "mtp_layers": 1},
    "hybrid": {**_MODEL, "type": "hybrid", "layer_pattern": "M-M-M*-M" * 2},
}


@pytest.mark.parametrize("kind", _KINDS_OF_MODELS)
def test_the_planner_and_predict_agree_on_every_stage_of_the_same_layout(tmp_path: Path, kind: str) -> None:
    device, model = find_device("B200"), _KINDS_OF_MODELS[kind]
    profile = analytic_profile(read_model_file(Path(_file(tmp_path, model))), device, 8)
    layout = Layout(pipeline_size=2, tensor_size=2, data_size=2, micro_batch_size=1, sequence_parallel=True)
    placement = ModulePlacement(layers={"text_decoder": (8, 8)}, recompute={"text_decoder": {}})
    found = evaluate(profile, Cluster(num_nodes=1, devices_per_node=8), layout, placement, 32)
    request = {
        "model": model,
        "hw": {"gpu": "B200", "num_gpus": 8, "gpus_per_node": 8},
        "parallel": {"tp": 2, "pp": 2},
        "train": {"gbs": 32, "mbs": 1},
    }
    predicted = predict_one(request)
    assert found.step.total_us / 1e3 == pytest.approx(predicted["step_time_ms"], rel=0.05)
    peaks = [rank.peak_bytes / 2**30 for rank in found.memory]
    assert peaks == pytest.approx([stage["peak_memory_gib"] for stage in predicted["stages"]], rel=0.05)


def test_a_large_model_under_tight_memory_is_proved_where_its_loss_holds_more_than_a_layer_needs() -> None:
    """DeepSeek-V3's sizes: rows that took every stage's transients for hidden behind the loss left a gap of 3.9 %."""
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    model = {
        "num_layers": 61,
        "hidden": 7168,
        "heads": 128,
        "ffn": 18432,
        "seq": 4096,
        "vocab": 129280,
        "swiglu": True,
        "num_experts": 256,
        "topk": 8,
        "moe_ffn": 2048,
        "shared_expert_ffn": 2048,
        "num_dense_layers": 3,
        "mtp_layers": 1,
        "mla": {**latent, "v_head_dim": 128},
    }
    profile = analytic_profile((Section("text_decoder", model),), find_device("H100"), 8)
    layout = Layout(pipeline_size=16, data_size=16, expert_size=16)
    options = SearchOptions(layouts=[layout], with_relaxations=False, time_limit_s=60)
    cluster = Cluster(num_nodes=32, devices_per_node=8, memory_limit_bytes=(80 * 1024 - 500) * 2**20)
    plan = search(profile, cluster, 1024, options)
    assert plan.search.status == "optimal"
    assert any(stage.recompute for stage in plan.stages)


def test_a_frozen_encoder_before_the_decoder_has_no_backward_and_no_optimizer(tmp_path: Path) -> None:
    encoder = {"name": "image_encoder", "num_layers": 8, "hidden": 1024, "heads": 16, "seq": 1024, "causal": False}
    content = {"modules": [{**encoder, "frozen": True}, {**_MODEL, "name": "text_decoder"}]}
    profile = analytic_profile(read_model_file(Path(_file(tmp_path, content))), find_device("910B"), 8)
    assert [module.name for module in profile.model.modules] == ["image_encoder", "text_decoder"]
    assert profile.model.modules[1].predecessors == ("image_encoder",)
    layer = profile.measurements[0].modules["image_encoder"].layer
    assert layer.forward_us > 0
    assert (layer.backward_us, layer.dense.optimizer_bytes, layer.dense.gradient_bytes) == (0, 0, 0)
    assert layer.dense.parameter_bytes > 0


def test_decoder_layers_that_get_features_of_the_encoder_stay_with_its_end(tmp_path: Path) -> None:
    """Qwen3-VL's deepstack, where a plan without it cuts between the two."""
    encoder = {"name": "image_encoder", "num_layers": 8, "hidden": 2048, "heads": 16, "seq": 8192, "causal": False}
    cluster, options = Cluster(num_nodes=1, devices_per_node=8), SearchOptions(layouts=[Layout(pipeline_size=8)])
    found = []
    for more in ({}, {"deepstack_visual_indexes": [2, 4, 6]}):
        content = {"modules": [{**encoder, **more}, {**_MODEL, "name": "text_decoder"}]}
        profile = analytic_profile(read_model_file(Path(_file(tmp_path, content))), find_device("H100"), 8)
        plan = search(profile, cluster, 32, options)
        assert plan.search.status == "optimal"
        end = max(v for v, count in enumerate(plan.layers_of("image_encoder")) if count)
        found.append(plan.layers_of("text_decoder")[end])
    assert found[0] < 3 <= found[1]


def test_experts_are_planned_over_expert_ranks(tmp_path: Path) -> None:
    model = {**_MODEL, "type": "moe", "num_experts": 8, "topk": 2, "moe_ffn": 4096}
    profile = analytic_profile(read_model_file(Path(_file(tmp_path, model))), find_device("H100"), 8)
    experts = {
        point.at.expert_size: point.modules["text_decoder"].layer.expert.num_parameters
        for point in profile.measurements
        if (point.at.tensor_size, point.at.micro_batch_size) == (1, 1)
    }
    assert experts[8] * 8 == experts[1] > 0
    assert max(experts) == 8  # as many as there are


def test_many_experts_are_planned_over_several_nodes(tmp_path: Path) -> None:
    model = {**_MODEL, "type": "moe", "num_experts": 256, "topk": 8, "moe_ffn": 512}
    profile = analytic_profile(read_model_file(Path(_file(tmp_path, model))), find_device("H100"), 8)
    layers = {
        point.at.expert_size: point.modules["text_decoder"].layer
        for point in profile.measurements
        if (point.at.tensor_size, point.at.micro_batch_size) == (1, 1)
    }
    assert sorted(layers) == [1, 2, 4, 8, 16, 32, 64]
    assert layers[64].expert.num_parameters * 64 == layers[1].expert.num_parameters
    assert layers[64].forward_us > layers[8].forward_us  # the exchange leaves the node


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], "--profile is missing"),
        (["--profile-source", "analytic"], "needs --model"),
        (["--device", "H100"], "--device: requires --profile-source analytic"),
        (["--profile-source", "analytic", "--model", "MODEL"], "needs --device"),
        (["--profile-source", "analytic", "--model", "MODEL", "--device", "TPU"], "unknown device 'TPU'"),
        (["--profile-source", "analytic", "--model", "MODEL", "--device", "H100", "--profile", "p.json"], "give one"),
        (
            ["--profile-source", "analytic", "--model", "MODEL", "--device", "H100", "--network-gbit-per-s", "-1"],
            "above 0",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    model = _file(tmp_path, _MODEL)
    assert exit_code([*_PLAN, *(model if word == "MODEL" else word for word in changes)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "must be an object"),
        ({"modules": []}, "modules must be a list"),
        ({"modules": [{"num_layers": 2}]}, "modules[0].name is missing"),
        ({**_MODEL, "hidden": 4097}, "text_decoder: model.hidden 4097"),
        ({"model": {"num_layers": 2}}, "model.hidden is missing"),
    ],
)
def test_a_model_file_that_describes_no_model_is_refused_with_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object, words: str
) -> None:
    assert main(_analytic(tmp_path, content)) == 2
    assert words in capsys.readouterr().err


def test_planning_from_shapes_loads_neither_torch_nor_megatron(tmp_path: Path) -> None:
    code = (
        "import sys; from mindspeed_autoparallel.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(any(name.split('.')[0] in ('torch', 'megatron') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *_analytic(tmp_path)], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-1000:]


def test_whole_experts_of_tensor_ranks_cost_as_much_as_in_predict(tmp_path: Path) -> None:
    profile = analytic_profile(read_model_file(Path(_file(tmp_path, _EXPERTS))), find_device("B200"), 8)
    cluster, steps = Cluster(num_nodes=1, devices_per_node=8), {}
    placement = ModulePlacement(layers={"text_decoder": (16,)}, recompute={"text_decoder": {}})
    for shared in (4, 1):
        layout = Layout(tensor_size=4, data_size=2, expert_size=2, expert_tensor_size=shared, sequence_parallel=True)
        found = evaluate(profile, cluster, layout, placement, 32)
        request = {
            "model": _EXPERTS,
            "hw": {"gpu": "B200", "num_gpus": 8, "gpus_per_node": 8},
            "parallel": {"tp": 4, "ep": 2, "etp": shared},
            "train": {"gbs": 32, "mbs": 1},
        }
        predicted = predict_one(request)
        assert found.step.total_us / 1e3 == pytest.approx(predicted["step_time_ms"], rel=0.05)
        assert found.memory[0].peak_bytes / 2**30 == pytest.approx(predicted["peak_memory_gib"], rel=0.05)
        steps[shared] = found.step.total_us
    assert steps[1] < 0.95 * steps[4]
    plan = search(profile, cluster, 32, SearchOptions(space=SpaceOptions(virtual_sizes=(1,)), with_relaxations=False))
    assert plan.step.total_us <= steps[1]
    tried = {(v.layout.tensor_size, v.layout.expert_tensor_size) for v in plan.search.verdicts}
    assert {(4, 0), (4, 1)} <= tried and (1, 1) not in tried


def test_experts_with_biases_are_whole(tmp_path: Path) -> None:
    """As Megatron asserts: a bias is added to whole experts alone."""
    model = {**_EXPERTS, "expert_bias": True}
    profile = analytic_profile(read_model_file(Path(_file(tmp_path, model))), find_device("H100"), 8)
    asked = {(m.at.tensor_size > 1, m.at.expert_tensor_size) for m in profile.measurements}
    assert asked == {(False, 0), (True, 1)}


def test_a_model_has_all_its_parameters_whatever_points_are_computed() -> None:
    model = {"num_layers": 4, "hidden": 1024, "heads": 16, "ffn": 4096, "seq": 2048, "vocab": 32000}
    sections, device = [Section("text_decoder", model)], find_device("H100")
    whole = analytic_profile(sections, device, 8)
    split = analytic_profile(sections, device, 8, points=[MeasuredAt(tensor_size=8, sequence_parallel=True)])
    assert split.model == whole.model
