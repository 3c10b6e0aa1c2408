"""The split command: MindSpeed's file with MindSpeed's meaning, the JSON, infeasible input, bad input."""

from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exit_codes import exit_code
from language_profile import language_profile
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.split import SplitProblem, solve, time_of
from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
from mindspeed_autoparallel.profiles import mean_layer, read_profile
from mindspeed_autoparallel.spec import Cluster, Layout

P2P_GIB_PER_S = 25.0
SEQUENCE, MICRO_BATCH, HIDDEN = 1024, 2, 4096
BLOCKS = {
    "vit_pre": (2.0, 3.0, 10, [5, 20, 10]),
    "vit": (4.0, 9.0, 100, [10, 40, 20]),
    "vit_post": (1.0, 2.0, 20, [8, 32, 16]),
    "llm_pre": (0.5, 1.0, 30, [50, 200, 100]),
    "llm": (7.0, 15.0, 300, [30, 90, 60]),
    "llm_post": (5.0, 10.0, 200, [50, 200, 100]),
}
CONTENT: dict[str, Any] = {
    **{
        name: {"fwd_time": forward, "bwd_time": backward, "act_mem": memory, "module_param": state}
        for name, (forward, backward, memory, state) in BLOCKS.items()
    },
    "image_encoder": {"vision_encoder": {"num_layers": 4}},
    "text_decoder": {"num_layers": 6, "hidden_size": HIDDEN, "seq_length": SEQUENCE},
    "micro_batch_size": MICRO_BATCH,
    "grad_acc_step": 8,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model_profile.json"
    path.write_text(json.dumps(CONTENT))
    return path


def command(file: Path, **changes: Any) -> list[str]:
    options = {"pipeline-size": 3, "num-microbatches": 5, "memory-limit-mib": 6000} | {
        key.replace("_", "-"): value for key, value in changes.items()
    }
    return ["split", "--profile", str(file), *(f"--{key}={value}" for key, value in options.items())]


def split(file: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0, **changes: Any) -> dict[str, Any]:
    assert main([*command(file, **changes), "--json", *flags]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def by_hand(result: dict[str, Any], stage: int, microbatches: int) -> tuple[float, float, float]:
    """Forward ms, backward ms and MiB of a stage, from the file's numbers and MindSpeed's rules alone."""
    stages = len(result["stage_memory_mib"])
    in_flight = min(stages - stage, microbatches)
    forward = backward = activations = recomputed = static = 0.0
    for module in ("vit", "llm"):
        layers, again = result["placement"][module][stage], result["recompute"][module][stage]
        held = [module] * layers
        # The pre block holds the module's first layer, the post block its last one.
        if layers and not any(result["placement"][module][:stage]):
            held[0] = f"{module}_pre"
        if layers and not any(result["placement"][module][stage + 1 :]):
            held[-1] = f"{module}_post"
        for name in held:
            time, back, memory, state = BLOCKS[name]
            forward, backward, activations, static = (
                forward + time,
                backward + back,
                activations + memory,
                static + sum(state),
            )
        recomputed += sum(min(BLOCKS[name][2], BLOCKS[module][2]) for name in held[:again])
        backward += again * BLOCKS[module][0]
    return forward, backward, (activations - recomputed) * (in_flight - 1) + activations + static


@pytest.mark.parametrize("limit", [1330, 1500, 6000])
def test_mindspeeds_file_is_read_with_mindspeeds_meaning(
    file: Path, capsys: pytest.CaptureFixture[str], limit: int
) -> None:
    result = split(file, capsys, memory_limit_mib=limit)
    assert result["status"] == "optimal"
    assert result["step_time_ms"] == result["lower_bound_ms"]
    assert sum(result["placement"]["vit"]) == 4
    assert sum(result["placement"]["llm"]) == 6
    stages = [by_hand(result, stage, 5) for stage in range(3)]
    assert result["stage_memory_mib"] == pytest.approx([memory for _, _, memory in stages])
    assert max(result["stage_memory_mib"]) <= limit
    assert any(result["recompute"]["llm"]) == (limit < 6000)
    # 1F1B, written out: every operation waits for its stage's last one and for its neighbour's message.
    link = SEQUENCE * MICRO_BATCH * HIDDEN * 2 / (P2P_GIB_PER_S * 2**30) * 1000
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * 3
    orders = []
    for stage in range(3):
        warmup = min(5, 2 - stage)
        order = [("F", m) for m in range(warmup)]
        for m in range(5 - warmup):
            order += [("F", warmup + m), ("B", m)]
        orders.append(order + [("B", m) for m in range(5 - warmup, 5)])
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, m = order[0]
                other = stage - 1 if kind == "F" else stage + 1
                if 0 <= other < 3 and (kind, other, m) not in ends:
                    break
                arrived = ends[kind, other, m] + link if 0 <= other < 3 else 0.0
                free[stage] = ends[kind, stage, m] = max(free[stage], arrived) + stages[stage][kind == "B"]
                order.pop(0)
    assert result["step_time_ms"] == pytest.approx(max(free), abs=1e-3)


def test_json_has_every_key_and_lists_of_pipeline_length(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = split(file, capsys)
    assert list(result) == [
        "status",
        "step_time_ms",
        "lower_bound_ms",
        "placement",
        "recompute",
        "stage_memory_mib",
        "rounds",
        "solve_seconds",
        "baselines",
        "limits",
    ]
    assert set(result["baselines"]) == {"even", "greedy"}
    for plan in (result, *result["baselines"].values()):
        for row in (*plan["placement"].values(), *plan["recompute"].values()):
            assert len(row) == 3
    assert all(plan["step_time_ms"] >= result["step_time_ms"] for plan in result["baselines"].values() if plan["fits"])
    limits = result["limits"]
    assert sum(limits["share_of_stage"]) + limits["share_of_messages"] == pytest.approx(1, abs=1e-3)
    assert limits["share_of_stage"][limits["slowest_stage"]] == max(limits["share_of_stage"])


def test_pipeline_of_one_stage_is_planned(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = split(file, capsys, pipeline_size=1, num_microbatches=3)
    assert result["placement"] == {"vit": [4], "llm": [6]}
    forward, backward, memory = by_hand(result, 0, 3)
    assert result["step_time_ms"] == pytest.approx(3 * (forward + backward))
    assert result["stage_memory_mib"] == pytest.approx([memory])


def test_slower_links_cost_time(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert split(file, capsys, p2p_gbit_per_s=1)["step_time_ms"] > split(file, capsys)["step_time_ms"]


@pytest.mark.parametrize(
    "schedule", [{}, {"schedule": "interleaved", "virtual_pipeline_size": 2, "num_microbatches": 6}]
)
def test_where_nothing_fits_the_smallest_limit_with_a_plan_is_reported(
    file: Path, capsys: pytest.CaptureFixture[str], schedule: dict[str, Any]
) -> None:
    result = split(file, capsys, code=3, memory_limit_mib=500, **schedule)
    assert result["status"] == "infeasible"
    needed = result["smallest_memory_limit_mib"]
    assert str(needed) in result["reason"]
    assert split(file, capsys, memory_limit_mib=needed, **schedule)["status"] == "optimal"
    assert split(file, capsys, code=3, memory_limit_mib=needed - 1, **schedule)["status"] == "infeasible"
    assert split(file, capsys, code=3, memory_limit_mib=500.7, **schedule)["smallest_memory_limit_mib"] == needed
    assert main(command(file, memory_limit_mib=500, **schedule)) == 3
    error = capsys.readouterr().err
    assert error.startswith("InfeasiblePlan: no plan fits in 500 MiB")
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [{}, {"schedule": "interleaved", "virtual_pipeline_size": 2, "num_microbatches": 6}]
)
def test_next_best_plans_differ_and_follow_in_order(
    file: Path, capsys: pytest.CaptureFixture[str], schedule: dict[str, Any]
) -> None:
    result = split(file, capsys, "--top-k=6", memory_limit_mib=1900, **schedule)
    assert result["alternatives_proved"]
    plans = [result, *result["alternatives"]]
    assert len(plans) == 6
    assert len({json.dumps(plan["placement"]) for plan in plans}) == 6
    steps = [plan["step_time_ms"] for plan in plans]
    assert steps == sorted(steps)
    assert max(max(plan["stage_memory_mib"]) for plan in plans) <= 1900


def test_what_if_equals_the_result_of_the_changed_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = split(file, capsys, "--what-if", memory_limit_mib=1330)
    more, twice = result["what_if"]
    assert more["step_time_ms"] == split(file, capsys, memory_limit_mib=2354)["step_time_ms"]
    assert more["gain_fraction"] == pytest.approx(1 - more["step_time_ms"] / result["step_time_ms"], abs=1e-5)
    assert twice["step_time_ms"] == split(file, capsys, memory_limit_mib=1330, num_microbatches=10)["step_time_ms"]
    assert 0 < twice["gain_fraction"] < 1
    assert main([*command(file, memory_limit_mib=2000), "--what-if", "--top-k=3"]) == 0
    text = capsys.readouterr().out
    assert "one more GiB" in text
    assert text.count("\nor ") == 2


def test_same_input_and_seed_give_the_same_plan(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for schedule in ({}, {"schedule": "interleaved", "virtual_pipeline_size": 2, "num_microbatches": 6}):
        results = [split(file, capsys, "--seed=3", memory_limit_mib=3000, **schedule) for _ in range(3)]
        for result in results:
            del result["solve_seconds"]
        assert results[0] == results[1] == results[2]


def test_our_own_profile_is_split_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_profile().write(tmp_path / "profile.json")
    result = split(tmp_path / "profile.json", capsys, pipeline_size=2, num_microbatches=4)
    assert result["status"] == "optimal"
    assert all(len(row) == 2 for row in result["placement"].values())


def test_layers_of_several_kinds_are_one_module_with_their_own_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = language_profile(num_layers=6, tensor=(1,), batches=(1,))
    (measurement,) = profile.measurements
    (module,) = measurement.modules.values()
    heavy = replace(module.layer, forward_us=3 * module.layer.forward_us, backward_us=3 * module.layer.backward_us)
    kinds, pattern = (module.layer, heavy), (0, 0, 0, 0, 1, 1)
    mixed = replace(module, kinds=kinds, pattern=pattern, layer=mean_layer(kinds, pattern))
    path = tmp_path / "profile.json"
    replace(profile, measurements=(replace(measurement, modules={"text_decoder": mixed}),)).write(path)
    assert (
        main(
            [
                "split",
                "--profile",
                str(path),
                "--pipeline-size",
                "2",
                "--num-microbatches",
                "16",
                "--memory-limit-mib",
                "60000",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    # Four light layers and two heavy ones: the heavy ones are as much work as six light ones.
    assert result["placement"] == {"llm": [4, 2]}
    assert result["recompute"] == {"llm": [0, 0]}
    assert result["status"] == "optimal"


def edited(*path: str, to: Any) -> dict[str, Any]:
    content = copy.deepcopy(CONTENT)
    place = content
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return content


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (edited("llm", "fwd_time", to=-1.0), "llm.fwd_time"),
        (edited("llm", "bwd_time", to=math.nan), "not a JSON number"),
        (edited("vit", "fwd_time", to=math.inf), "not a JSON number"),
        (edited("vit", "act_mem", to="100"), "vit.act_mem"),
        (edited("vit", "act_mem", to=None), "`act_mem` - at `$.vit`"),
        (edited("llm", "module_param", to=[1, 2]), "module_param"),
        (edited("llm_post", to=None), "llm_post"),
        (edited("text_decoder", to=None), "text_decoder"),
        (edited("text_decoder", "num_layers", to=0), "num_layers"),
        (edited("text_decoder", "num_layers", to=math.nan), "not a JSON number"),
        (edited("text_decoder", "num_layers", to=math.inf), "not a JSON number"),
        (edited("text_decoder", "num_layers", to=2.5), "num_layers"),
        (edited("text_decoder", "num_layers", to=10**6), "num_layers"),
        (edited("text_decoder", "num_layers", to=4000), "at most 1024"),
        (edited("micro_batch_size", to=0), "micro_batch_size"),
        (edited("micro_batch_size", to=1e308), "micro_batch_size"),
        (edited("llm", "fwd_time", to=1e300), "llm.fwd_time"),
        (edited("llm", "fwd_time", to=1e308), "llm.fwd_time"),
        ([1, 2], ""),
    ],
)
def test_impossible_profile_is_one_line_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str
) -> None:
    (tmp_path / "p.json").write_text(json.dumps(content))
    assert main(command(tmp_path / "p.json")) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pipeline_size": 11}, "more than the 10 layers"),
        ({"pipeline_size": 99999}, "more than the 10 layers. Lower --pipeline-size to 10 or below.\n"),
        (
            {"schedule": "interleaved", "virtual_pipeline_size": 99999, "num_microbatches": 6},
            "more than the 10 layers. Take fewer chunks.\n",
        ),
        ({"pipeline_size": 0}, "at least 1"),
        ({"num_microbatches": 0}, "at least 1"),
        ({"num_microbatches": -4}, "at least 1"),
        ({"num_microbatches": 10**9}, "operations"),
        ({"schedule": "interleaved", "virtual_pipeline_size": 2, "num_microbatches": 2}, "microbatches"),
        ({"virtual_pipeline_size": 2}, "interleaved"),
        ({"memory_limit_mib": 0}, "memory-limit-mib"),
        ({"memory_limit_mib": "nan"}, "memory-limit-mib"),
        ({"memory_limit_mib": "inf"}, "memory-limit-mib"),
        ({"memory_limit_mib": -1}, "memory-limit-mib"),
        ({"p2p_gbit_per_s": 0}, "bandwidth"),
        ({"p2p_gbit_per_s": "nan"}, "bandwidth"),
        ({"time_limit_s": 0}, "time-limit-s"),
        ({"top_k": 0}, "top-k"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_number_is_one_line_and_exit_code_two(
    file: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    assert exit_code(command(file, **changes)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_problem_keeps_the_files_numbers_to_the_nanosecond_and_byte(file: Path) -> None:
    problem: SplitProblem = problem_from_profile(
        read_profile(file, p2p_gbps=P2P_GIB_PER_S), num_stages=2, num_microbatches=4, memory_limit_mib=9000
    )
    first, layer, last = (segment for segment in problem.segments if segment.name == "llm")
    # The file's pre and post blocks are the first and the last of the six.
    assert [first.num_layers, layer.num_layers, last.num_layers] == [1, 4, 1]
    assert [first.forward, last.forward] == [500_000, 5_000_000]
    assert (layer.forward, layer.backward) == (7_000_000, 15_000_000)
    plain, again = layer.kinds
    assert again.extra_backward == 7_000_000
    assert plain.memory == ((300 * 2 + 180) * 2**20, (300 + 180) * 2**20)
    assert again.memory == ((300 + 180) * 2**20, (300 + 180) * 2**20)
    assert solve(problem).status == "optimal"


def test_a_distributed_optimizer_splits_two_thirds_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({**CONTENT, "use_distributed_optimizer": True}))
    profile = read_profile(tmp_path / "p.json", p2p_gbps=P2P_GIB_PER_S)
    state = profile.measurements[0].modules["text_decoder"].kinds[1].dense
    assert (state.optimizer_unshardable_bytes, state.optimizer_bytes) == (30 * 2**20, 60 * 2**20)


def test_a_module_of_one_layer_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.json").write_text(json.dumps(edited("text_decoder", "num_layers", to=1)))
    assert main(command(tmp_path / "p.json")) == 2
    assert "llm_pre and llm_post hold the first and the last one" in capsys.readouterr().err


def test_virtual_stages_are_compared_with_one_chunk_per_stage(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interleaved = {"schedule": "interleaved", "virtual_pipeline_size": 2, "num_microbatches": 6}
    result = split(file, capsys, **interleaved)
    plain = split(file, capsys, num_microbatches=6)
    told = result["without_virtual_stages"]
    assert told["step_time_ms"] == plain["step_time_ms"]
    assert told["gain_fraction"] == pytest.approx(1 - result["step_time_ms"] / plain["step_time_ms"], abs=1e-6)
    assert "without_virtual_stages" not in plain
    assert main(command(file, **interleaved)) == 0
    printed = capsys.readouterr().out
    first = result["placement"]["llm"][::3]
    assert f"llm {first[0]}+{first[1]} " in printed
    assert "without virtual stages" in printed
    sizes = result["microbatch_group_sizes"]
    assert [one["size"] for one in sizes] == [3, 6]
    assert f"{result['microbatch_group_size']} microbatches of a chunk in a row; searched: 3, 6" in printed
    alone = [split(file, capsys, **interleaved, microbatch_group_size=one["size"])["step_time_ms"] for one in sizes]
    assert result["step_time_ms"] == min(alone)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_heavy_output_layer_is_a_stage_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chunks: int
) -> None:
    profile = language_profile(num_layers=6, tensor=(1,), batches=(1,))
    (measurement,) = profile.measurements
    cost = measurement.modules["text_decoder"]
    assert cost.post is not None
    heavy = replace(cost, post=replace(cost.post, forward_us=2.5 * cost.layer.forward_us))
    replace(profile, measurements=(replace(measurement, modules={"text_decoder": heavy}),)).write(tmp_path / "p.json")
    sizes = {"pipeline_size": 2, "num_microbatches": 4, "memory_limit_mib": 60_000}
    if chunks > 1:
        sizes |= {"schedule": "interleaved", "virtual_pipeline_size": chunks, "microbatch_group_size": 2}
    else:
        sizes |= {"pipeline_size": 4}
    alone = split(tmp_path / "p.json", capsys, **sizes)
    kept = split(tmp_path / "p.json", capsys, "--no-standalone-ends", **sizes)
    assert list(alone["placement"]) == ["llm"] and sum(alone["placement"]["llm"]) == 6
    assert alone["placement"]["llm"][-1] == 0 < kept["placement"]["llm"][-1]
    assert alone["step_time_ms"] < kept["step_time_ms"]
    assert alone["baselines"] == kept["baselines"]
    names = ("num_stages", "num_microbatches", "memory_limit_mib")
    problem = problem_from_profile(
        read_profile(tmp_path / "p.json"),
        **dict(zip(names, (sizes["pipeline_size"], 4, 60_000), strict=True)),
        schedule=sizes.get("schedule", "1f1b"),
        num_chunks=chunks,
        standalone_ends=True,
    )
    steps = []
    for ends in itertools.combinations(range(1, 8), 3):
        cuts = [0, *ends, 8]
        layers = tuple(max(0, min(b, 7) - max(a, 1)) for a, b in itertools.pairwise(cuts))
        none = (0,) * 4
        steps.append(time_of(problem, (((1, 0, 0, 0),), (layers, none, none), ((0, 0, 0, 1),))))
    assert (alone["status"], alone["step_time_ms"]) == ("optimal", pytest.approx(min(steps) / 1e6))


@pytest.mark.parametrize(("size", "chunks"), [(7, 1), (8, 1), (4, 2)])
def test_ends_alone_fill_more_stages_than_layers_as_in_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, chunks: int
) -> None:
    profile = language_profile(num_layers=6, tensor=(1,), batches=(1,))
    profile.write(tmp_path / "p.json")
    sizes: dict[str, Any] = {"pipeline_size": size, "num_microbatches": 8, "memory_limit_mib": 60_000}
    layout = Layout(pipeline_size=size, standalone_ends=True)
    if chunks > 1:
        sizes |= {"schedule": "interleaved", "virtual_pipeline_size": chunks, "microbatch_group_size": size}
        layout = replace(layout, virtual_size=chunks, schedule="interleaved")
    found = split(tmp_path / "p.json", capsys, **sizes)
    plan = search(profile, Cluster(num_nodes=1, devices_per_node=size), 8, SearchOptions(layouts=[layout]))
    assert tuple(found["placement"]["llm"]) == plan.layers_of("text_decoder")
    assert found["status"] == plan.search.status == "optimal" and found["baselines"] == {}
    assert main(command(tmp_path / "p.json", **sizes)) == 0
    assert "simple rules leave a stage empty" in capsys.readouterr().out
    for flags, most in (([], 8), (["--no-standalone-ends"], 6)):
        assert main([*command(tmp_path / "p.json", **{**sizes, "pipeline_size": 9}), *flags]) == 2
        assert f"Lower --pipeline-size to {most // chunks} or below" in capsys.readouterr().err


@pytest.mark.parametrize("size", [4, 8])
def test_more_stages_than_parts_are_refused_as_in_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    profile = small_profile()
    encoder, decoder = profile.model.modules
    modules = replace(encoder, deepstack_layers=4), decoder
    profile = replace(profile, model=replace(profile.model, modules=modules))
    profile.write(tmp_path / "p.json")
    layouts = [Layout(pipeline_size=size), Layout(data_size=size)]
    plan = search(profile, Cluster(num_nodes=1, devices_per_node=size), 8, SearchOptions(layouts=layouts))
    (verdict,) = [one for one in plan.search.verdicts if one.outcome == "illegal"]
    assert f"{size} stages are more than the 2 parts that 6 layers can be cut into" in verdict.reason
    assert main(command(tmp_path / "p.json", pipeline_size=size)) == 2
    error = capsys.readouterr().err
    assert verdict.reason in error and "Lower --pipeline-size to 2 or below" in error


def test_a_number_of_microbatches_that_the_pipeline_size_does_not_divide_runs_in_larger_groups(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interleaved = {"schedule": "interleaved", "virtual_pipeline_size": 2, "num_microbatches": 7}
    assert [one["size"] for one in split(file, capsys, **interleaved)["microbatch_group_sizes"]] == [4, 7]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_microbatches": 2}, "2 microbatches are fewer than the pipeline size 3. Give at least 3"),
        ({"num_microbatches": 7, "microbatch_group_size": 3}, "Possible: 4, 7."),
        ({"num_microbatches": 6, "microbatch_group_size": 7}, "do not run in groups of 7"),
        ({"num_microbatches": 6, "microbatch_group_size": 2}, "groups of 2"),
        ({"num_microbatches": 6, "virtual_pipeline_size": 4}, "more than the 10 layers"),
        ({"num_microbatches": 6, "virtual_pipeline_size": 1}, "2 chunks or more"),
    ],
)
def test_virtual_stages_that_cannot_run_are_named(
    file: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    assert main(command(file, **{"schedule": "interleaved", "virtual_pipeline_size": 2, **changes})) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_more_chunks_than_layers_names_the_pipeline_size_that_has_enough(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"schedule": "interleaved", "virtual_pipeline_size": 4, "num_microbatches": 6}
    assert main(command(file, **more)) == 2
    assert "Lower --pipeline-size to 2 or below, or take fewer chunks." in capsys.readouterr().err
    assert split(file, capsys, pipeline_size=2, **more)["status"] in ("optimal", "feasible")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_group_sizes_are_refused_without_virtual_stages(
    file: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    words = ["--pipeline-size", "2", "--num-microbatches", "4", "--memory-limit-mib", "9999", "--schedule", schedule]
    assert main(["split", "--profile", str(file), *words, "--microbatch-group-size", "2"]) == 2
    assert "--microbatch-group-size: virtual stages alone" in capsys.readouterr().err
