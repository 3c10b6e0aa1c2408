"""Plans chosen by drawn steps: the choice, its alternatives, the command, its pages, its time limit."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spread_samples import data_of, long_tail, profile_of, sample, searched

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.planner import wanted as composition
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.results import result_of
from mindspeed_autoparallel.planner.spread import choose
from mindspeed_autoparallel.planner.spread import waiting as waiting_module
from mindspeed_autoparallel.planner.spread.choose import choose_plan
from mindspeed_autoparallel.planner.spread.drawn_steps import PlanUnderData
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.planner.spread.interrupted import choose_until_interrupted
from mindspeed_autoparallel.planner.spread.memory import out_of_memory
from mindspeed_autoparallel.planner.spread.samples import SpreadOptions
from mindspeed_autoparallel.planner.spread.scaled import mean_profile
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.report import render_table
from mindspeed_autoparallel.report.answer import answer_of
from mindspeed_autoparallel.report.headline import headline, warnings
from mindspeed_autoparallel.report.search_data import baselines
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.units import MIB, format_bytes, format_us


def test_the_chosen_plan_is_the_fastest_safe_one_of_those_drawn() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=8)
    data = data_of(long_tail())
    loose = choose_plan(profile_of(), data, SpreadOptions(), searched(cluster, 32))
    assert loose.data is not None and len(loose.data.considered) >= 4
    assert loose.data.mean_us == min(one.mean_us for one in loose.data.considered)
    assert loose.data.mean_us > loose.data.by_means_us and loose.data.balanced_mean_us < loose.data.mean_us
    balanced = choose_plan(profile_of(), data, SpreadOptions(is_balanced=True), searched(cluster, 32))
    assert balanced.data is not None and balanced.data.mean_us <= loose.data.balanced_mean_us
    assert Plan.parse(json.loads(json.dumps(_as_json(loose)))) == loose


def test_as_many_alternatives_as_asked_for_are_listed() -> None:
    cluster, data = Cluster(num_nodes=1, devices_per_node=8), data_of(long_tail())
    one, many = (choose_plan(profile_of(), data, SpreadOptions(top_k=k), searched(cluster, 32)) for k in (1, 5))
    assert len(one.alternatives) == 1 and len(many.alternatives) > 3
    assert many.alternatives[:1] == one.alternatives


@functools.cache
def chosen(devices: int, batch: int, share: float) -> tuple[Cluster, Plan, Plan]:
    """Return a cluster, the plan of the mean sample with all its memory, and the plan of the data with a ``share`` of what
    that needs, or all if 0."""
    cluster, profile, data = Cluster(num_nodes=1, devices_per_node=devices), profile_of(), data_of(long_tail())
    at_mean = searched(cluster, batch)(mean_profile(profile, data, sample_factors(profile, data)), None)
    if share:
        needed = out_of_memory(profile, at_mean, data, sample_factors(profile, data), 1000).worst_bytes
        cluster = replace(cluster, memory_limit_bytes=int(share * needed))
    return cluster, at_mean, choose_plan(profile, data, SpreadOptions(oom_steps=1000), searched(cluster, batch))


@pytest.mark.parametrize(("devices", "batch", "share"), [(8, 32, 0.0), (4, 16, 0.8)])
def test_alternatives_are_the_next_best_layouts_by_drawn_steps_whichever_layout_wins(
    devices: int, batch: int, share: float
) -> None:
    """With little memory, the mean sample's layout has no safe plan."""
    _, at_mean, plan = chosen(devices, batch, share)
    assert plan.data is not None and (plan.layout == at_mean.layout) == (not share)
    others = plan.alternatives
    assert len(others) >= 2 and plan.layout not in [other.layout for other in others]
    steps = [plan.mean_us, *(other.step_us for other in others)]
    assert steps == sorted(steps)
    for other in others:
        safe = [one for one in plan.data.considered if one.oom_probability <= 1e-3]
        assert other.step_us == min(one.mean_us for one in safe if one.label == other.layout.label())
        assert other.lower_bound_us is None  # the search bounds steps of the mean sample, not means of drawn ones
    # The record is of the whole search: a plan slower than another for the mean sample is not optimal.
    assert plan.search.num_configurations == at_mean.search.num_configurations
    assert plan.search.lower_bound_us <= at_mean.step.total_us * (1 + 1e-9)
    assert (plan.search.status == "optimal") == (not share)
    assert not any("Another plan is faster" in line for line in warnings(plan))
    assert Plan.parse(json.loads(plan.text())) == plan


def test_a_tight_memory_changes_the_plan() -> None:
    data, profile = data_of(long_tail()), profile_of()
    factors = sample_factors(profile, data)
    tight, _, found = chosen(4, 16, 0.8)
    assert found.data is not None and found.data.oom_probability <= 1e-3
    assert max(one.oom_probability for one in found.data.considered) > 1e-3
    # No slower than what holds the largest microbatches everywhere: of what is safe the fastest is looked for.
    for_the_largest = searched(tight, 16)(mean_profile(profile, data, factors, 1.0), None)
    drawn = PlanUnderData(profile, for_the_largest, factors).drawn(data).in_order
    assert found.data.mean_us <= float(drawn.mean()) * (1 + 1e-9)
    with pytest.raises(InfeasiblePlan, match=r"none of|nothing fits|no plan"):
        choose_plan(
            profile, data, SpreadOptions(oom_steps=1000), searched(replace(tight, memory_limit_bytes=60 * MIB), 16)
        )


def test_a_plan_for_larger_microbatches_keeps_the_scope_of_its_host_and_has_a_note() -> None:
    tight, _, found = chosen(4, 16, 0.8)
    assert "among splits" not in headline(found).proof
    note = "note: the split was searched with memory for larger microbatches than the mean one"
    assert note in render_table(found)
    assert note not in render_table(chosen(8, 32, 0.0)[2])
    by_all = searched(tight, 16)

    def by_host(profile: Profile, layouts: list[Layout] | None) -> Plan:
        plan = by_all(profile, layouts)
        return replace(plan, search=replace(plan.search, scope="rows of the test"))

    of_host = choose_plan(profile_of(), data_of(long_tail()), SpreadOptions(oom_steps=1000), by_host)
    assert "among splits that this host runs: rows of the test" in headline(of_host).proof
    assert note in render_table(of_host)


def test_where_nothing_is_safe_the_longest_sample_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.Judged, "is_safe", False)
    data = data_of([sample(100), sample(900)])
    data = replace(data, source=replace(data.source, longest_record="set.json[7]"))
    cluster = Cluster(num_nodes=1, devices_per_node=2)
    with pytest.raises(InfeasiblePlan, match=r"The longest sample \(set.json\[7\]\) has 900 tokens"):
        choose_plan(profile_of(), data, SpreadOptions(), searched(cluster, 4))


def _as_json(plan: Plan) -> Any:
    from mindspeed_autoparallel.spec import to_json

    return to_json(plan)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    profile_of().write(tmp_path / "profile.json")
    data_of(long_tail()).write(tmp_path / "data.json")
    return tmp_path


def plan_command(files: Path, *flags: str) -> int:
    sizes = ["--nnodes", "1", "--nproc-per-node", "4", "--global-batch-size", "16", "--num-workers", "1"]
    return main(["plan", "--profile", str(files / "profile.json"), *sizes, *flags])


def test_the_command_prints_the_cost_of_the_spread(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(files, "--data", str(files / "data.json"), "--out", str(files)) == 0
    printed = capsys.readouterr().out
    for words in ("the spread costs", "would help: rearranged", "chance to run out of memory", "considered: "):
        assert words in printed
    plan = Plan.read(files / "plan.json")
    assert plan.data is not None and plan.data.sha256 == "abc"
    assert main(["report", "--plan", str(files / "plan.json"), "--page", str(files / "page.html")]) == 0
    page = (files / "page.html").read_text()
    assert "The spread costs" in page and "means of drawn steps" in page and "for the mean sample" in page
    capsys.readouterr()
    assert main(["simulate", "--plan", str(files / "plan.json")]) == 0


def test_reports_show_the_mean_of_drawn_steps_by_which_plans_are_compared() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=8)
    data = data_of(long_tail())
    plan = choose_plan(profile_of(), data, SpreadOptions(), searched(cluster, 32))
    assert plan.data is not None and plan.mean_us > 1.05 * plan.step.total_us
    head, answer, result = headline(plan), answer_of(plan), result_of(plan)
    assert answer.step_us == plan.mean_us == 1000 * result["e2e_time"]
    assert (head.p50_us, head.p95_us) == (plan.data.p50_us, plan.data.p95_us)
    # Tokens of the samples, of which the model's length is only the most.
    tokens = float(data.sizes()[:, 0] @ data.shares())
    assert tokens < plan.model.sequence_length / 2
    for rate in (answer.tokens_per_s_per_device, result["throughput"]):
        assert rate == pytest.approx(32 * tokens / (plan.mean_us / 1e6) / 8)
    assert answer.mfu is None
    worst = f"; {format_bytes(plan.data.worst_bytes)} on rank {plan.data.worst_rank} with the heaviest samples"
    assert answer.memory.endswith(f" free, for the mean sample{worst}")
    # Rules of thumb are not drawn: they are compared at the mean sample, as their bound is.
    assert baselines(plan)[0].step_us == plan.step.total_us
    assert ", for the mean sample" in head.proof
    table = render_table(plan)
    assert f"step {format_us(plan.mean_us)} predicted, the mean of drawn steps, " in table


def test_the_progress_of_a_choice_names_the_layouts_that_it_draws_and_splits_for_larger_microbatches() -> None:
    tight, _, plan = chosen(4, 16, 0.8)
    lines: list[str] = []
    wanted = composition.Wanted(
        cluster=tight,
        global_batch_size=16,
        options=SearchOptions(with_relaxations=False, num_workers=1),
        data=(data_of(long_tail()), SpreadOptions(oom_steps=1000)),
    )
    found = composition.find_plan(profile_of(), wanted, lines.append)
    assert isinstance(found, Plan) and found.data is not None and plan.data is not None
    assert not any("1 layout" in line for line in lines)
    assert [line for line in lines if "to search" in line] == [line for line in lines if "mean sample: " in line][:1]
    label = found.layout.label()
    searching = f"{label}: searching splits with memory for larger microbatches"
    mean = f"{found.data.mean_us / 1000:.2f} ms in drawn steps on average"
    assert lines.index(searching) < lines.index(f"{label} with memory for larger microbatches: {mean}")
    drawn = [line for line in lines if "drawn steps" in line and "larger" not in line]
    assert any("may run out of memory" in line for line in drawn)
    assert all(line.startswith("mean sample: ") or line in drawn or "larger microbatches" in line for line in lines)


@pytest.mark.parametrize("limit_s", [40.0, 4.0])
def test_the_time_limit_holds_for_all_searches_of_drawn_data_together(monkeypatch: Any, limit_s: float) -> None:
    real, used, given = time.monotonic, [0.0], []

    def search_to_the_limit(
        profile: Profile, cluster: Cluster, batch: int, options: SearchOptions, *, progress: Any
    ) -> Plan:
        given.append(options.time_limit_s)
        found = search(profile, cluster, batch, replace(options, time_limit_s=60))
        used[0] += options.time_limit_s
        return found

    monkeypatch.setattr(time, "monotonic", lambda: real() + used[0])
    monkeypatch.setattr(composition, "search", search_to_the_limit)
    options = SearchOptions(time_limit_s=limit_s, with_relaxations=False, num_workers=1)
    cluster, data = Cluster(num_nodes=1, devices_per_node=8), data_of(long_tail())
    training = composition.Wanted(
        cluster=cluster, global_batch_size=32, options=options, data=(data, SpreadOptions(is_balanced=True))
    )
    plan = composition.find_plan(profile_of(), training)
    assert isinstance(plan, Plan) and plan.data is not None
    assert given[0] == pytest.approx(limit_s / 2, abs=0.5)
    # A search gets a second at least; in time for one only, layouts after the first safe one are not drawn.
    assert sum(given) <= limit_s + 5
    assert any("time limit" in note for note in plan.data.notes) == (limit_s < 10)


def test_estimates_of_layouts_to_draw_end_with_half_of_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many microbatches an estimate takes seconds."""
    real, real_waiting, used, estimates = time.monotonic, waiting_module.waiting, [0.0], []

    def slow(*arguments: Any) -> float:
        used[0] += 3.0
        estimates.append(arguments)
        return real_waiting(*arguments)

    cluster, _, plan = chosen(8, 32, 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: real() + used[0])
    monkeypatch.setattr(waiting_module, "waiting", slow)
    search_one = searched(cluster, 32)
    late = choose_plan(
        profile_of(), data_of(long_tail()), SpreadOptions(oom_steps=1000), search_one, time.monotonic() + 40
    )
    assert len(estimates) in (6, 7)
    assert late.data is not None and plan.data is not None and late.data.mean_us >= plan.data.mean_us
    assert any("time limit" in note for note in late.data.notes)
    assert not any("time limit" in note for note in plan.data.notes)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_choice_has_drawn_steps_and_a_probability(after: int) -> None:
    """The step for the mean sample with the tokens of the longest one is a throughput that no device has."""
    cluster, at_mean, _ = chosen(8, 32, 0.0)
    run, searches = searched(cluster, 32), list[Plan]()

    def stopping(one: Profile, layouts: list[Layout] | None) -> Plan:
        searches.append(run(one, layouts))
        if len(searches) > after:
            raise Stopped(searches[-1], KeyboardInterrupt())
        return searches[-1]

    with pytest.raises(Stopped) as stopped:
        choose_until_interrupted(profile_of(), data_of(long_tail()), SpreadOptions(oom_steps=1000), stopping)
    plan = stopped.value.plan
    assert plan.data is not None and plan.data.mean_us >= plan.step.total_us
    assert plan.data.tokens_per_sample == data_of(long_tail()).mean_tokens
    assert plan.search.num_configurations == at_mean.search.num_configurations


@pytest.mark.parametrize("share", [0.8, 1.5])
def test_the_first_safe_split_takes_one_search_if_memory_allows(share: float) -> None:
    cluster, at_mean, _ = chosen(4, 16, 0.0)
    data, profile = data_of(long_tail()), profile_of()
    needed = out_of_memory(profile, at_mean, data, sample_factors(profile, data), 1000).worst_bytes
    samples = choose.Samples.of(profile, data, SpreadOptions(oom_steps=1000))
    run, shares = searched(replace(cluster, memory_limit_bytes=int(share * needed)), 16), []

    def counted(one: Profile, layouts: list[Layout] | None) -> Plan:
        shares.append(one)
        return run(one, layouts)

    arguments = (samples, samples.mean_profile(), at_mean.layout, counted)
    all_splits = choose.safe_splits(*arguments)
    num_searches = len(shares)
    first = choose.safe_splits(*arguments, only_first=True)
    assert bool(first) == bool(all_splits)
    assert all(one.is_safe for one in (*first, *all_splits))
    if share > 1:
        assert len(first) == 1 and len(shares) == num_searches + 1
        assert first[0].mean_us >= all_splits[-1].mean_us


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data-balance",), "--data-balance needs --data"),
        (("--max-oom-probability", "nan", "--oom-steps", "-5"), "--max-oom-probability, --oom-steps need --data"),
        (("--data-padding", "none"), "--data-padding needs --data"),
        (
            ("--data", "DATA", "--data-pack-length", "900"),
            "--data-pack-length must be at least 1 and needs --data-padding none",
        ),
        (
            ("--data", "DATA", "--data-pack-length", "100", "--data-padding", "none", "--data-balance"),
            "fits in no pack of 100",
        ),
        (("--data", "DATA", "--max-oom-probability", "0"), "--max-oom-probability must be above 0"),
        (("--data", "DATA", "--oom-steps", "0"), "--oom-steps must be at least 1"),
        (("--data", "PROFILE"), "is not a data distribution"),
        (("--data", "DATA", "--mm-data", "SET"), "has other records (sha256 abc)"),
    ],
)
def test_bad_input_is_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    (files / "records.json").write_text('[{"messages": []}]')
    parameters = {"basic_parameters": {"dataset": str(files / "records.json")}}
    (files / "set.json").write_text(json.dumps({"dataset_param": parameters}))
    names = {"DATA": "data.json", "PROFILE": "profile.json", "SET": "set.json"}
    given = [str(files / names[flag]) if flag in names else flag for flag in flags]
    assert plan_command(files, *given) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_longer_samples_than_the_profiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="the longest sample has 5000 tokens, the profile's sequences 1024"):
        sample_factors(profile_of(), data_of([sample(5000)]))
