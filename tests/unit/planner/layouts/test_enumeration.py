"""Every legal combination of every size, against enumeration: layouts, chunks, placements, recomputation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import memory_of_rank
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.profiles import MeasuredAt, Measurement, ModuleCost, Profile, StateBytes
from mindspeed_autoparallel.spec import Cluster, Layout, Model, Module
from mindspeed_autoparallel.units import MIB

NUM_LAYERS = 4
OUTCOMES = {"solved", "bounded", "memory", "illegal", "unmeasured", "excluded"}


def _language_model(capacity_mib: int = 4000, post_us: float = 240.0, whole_experts: bool = False) -> Profile:
    """Costs by TP, CP, EP, MBS, SP and ETP that are all different, so that no two layouts tie."""

    def experts(at: MeasuredAt) -> StateBytes:
        size = whole_experts * 40 * MIB // (at.expert_size * (at.expert_tensor_size or at.tensor_size))
        return StateBytes(
            num_parameters=size // 2, parameter_bytes=size, gradient_bytes=2 * size, optimizer_bytes=6 * size
        )

    def cost(at: MeasuredAt) -> ModuleCost:
        share = at.micro_batch_size / (at.tensor_size**0.9 * at.context_size**0.85 * at.expert_size**0.2)
        share *= (0.97 if at.sequence_parallel else 1.0) * (0.93 if at.expert_tensor_size else 1.0)
        saved = round(30 * share * (0.8 if at.sequence_parallel else 1.0)) + 1
        return ModuleCost(
            pre=block(20 * share),
            layer=replace(block(900 * share, saved_mib=saved, recomputable=True), expert=experts(at)),
            post=block(post_us * share, saved_mib=saved),
        )

    points = [
        MeasuredAt(
            tensor_size=t, context_size=c, expert_size=e, micro_batch_size=m, sequence_parallel=s, expert_tensor_size=x
        )
        for t, c, e, m, s, x in product(
            (1, 2), (1, 2), (1, 2, 4) if whole_experts else (1, 2), (1, 2), (False, True), (0, 1)
        )
        if not (s and t == 1) and ((whole_experts and t > 1) or not x)
    ]
    module = Module(name="text_decoder", result_key="llm", num_layers=NUM_LAYERS, num_experts=4)
    return small_profile(
        capacity_mib=capacity_mib,
        model=Model(name="small", modules=(module,), sequence_length=128),
        measurements=tuple(Measurement(at=at, modules={"text_decoder": cost(at)}) for at in points),
    )


def _rows(num: int, standalone_ends: bool = False) -> list[tuple[int, ...]]:
    """All splits with a layer on every stage; the first and the last may have none where the ends may be alone."""
    least = [0 if standalone_ends and num > 1 and v in (0, num - 1) else 1 for v in range(num)]
    rows = product(*(range(low, NUM_LAYERS + 1) for low in least))
    return [row for row in rows if sum(row) == NUM_LAYERS]


def _best_of(profile: Profile, cluster: Cluster, candidate: Candidate, batch: int) -> float | None:
    best = None
    for row in _rows(candidate.layout.num_virtual_stages, candidate.layout.standalone_ends):
        for again in product(*(range(count + 1) for count in row)):
            placement = ModulePlacement(layers={"text_decoder": row}, recompute={"text_decoder": {"full": again}})
            found = evaluate(profile, cluster, candidate.layout, placement, batch, with_timeline=False)
            if found.fits and (best is None or found.step.total_us < best):
                best = found.step.total_us
    return best


def _with_group_sizes(candidate: Candidate) -> list[Candidate]:
    """The layout with every group size of the interleaved schedule, its own (which needs no name) first."""
    layout, count = candidate.layout, candidate.num_microbatches
    if layout.schedule != "interleaved":
        return [candidate]
    others = range(layout.pipeline_size + 1, count + 1)
    legal = [size for size in others if not 0 < count % size < layout.pipeline_size]
    return [candidate, *(replace(candidate, layout=replace(layout, microbatch_group_size=size)) for size in legal)]


def _by_hand(cluster: Cluster, batch: int, options: SpaceOptions, whole_experts: bool) -> set[str]:
    """Labels of all layouts with the cluster's number of devices that break no rule, found without the search."""
    labels = set()
    sizes = (1, 2, 4, 8)
    experts, shares = ((1, 2, 4), (0, 1)) if whole_experts else ((1, 2), (0,))
    every = product(sizes, (1, 2), sizes, (1, 2), experts, (1, 2, 4), (1, 2), (False, True), shares)
    for p, t, d, c, e, v, m, s, x in every:
        if (
            p * t * d * c != cluster.num_devices
            or p * v > NUM_LAYERS + 2 * options.standalone_ends
            or (s and t == 1)
            or (v > 1 and p == 1)
            or (x and t == 1)
        ):
            continue
        if (d * c * t) % (e * (x or t)) or batch % (d * m) or (v > 1 and batch // (d * m) < p):
            continue
        labels.add(
            Layout(
                pipeline_size=p,
                tensor_size=t,
                data_size=d,
                context_size=c,
                expert_size=e,
                virtual_size=v,
                micro_batch_size=m,
                sequence_parallel=s,
                expert_tensor_size=x,
                schedule="1f1b" if v == 1 else "interleaved",
                distributed_optimizer=options.distributed_optimizer,
            ).label()
        )
    return labels


@pytest.mark.parametrize(
    ("capacity_mib", "distributed", "overlap", "alone", "whole_experts"),
    [
        (4000, True, False, False, False),
        (330, True, True, False, False),
        (330, False, False, False, False),
        (330, True, False, True, False),
        (330, False, True, True, False),
        (500, True, False, False, True),
        (500, False, True, False, True),
    ],
)
def test_every_legal_combination_has_a_true_verdict(
    capacity_mib: int, distributed: bool, overlap: bool, alone: bool, whole_experts: bool
) -> None:
    profile = _language_model(capacity_mib, 1900.0 if alone else 240.0, whole_experts)
    cluster, batch = Cluster(num_nodes=1 if alone else 2, devices_per_node=2), 8
    options = SpaceOptions(distributed_optimizer=distributed, overlap_gradient_reduce=overlap, standalone_ends=alone)
    candidates, _ = enumerate_layouts(profile, cluster, batch, options)
    assert {candidate.layout.label() for candidate in candidates} == _by_hand(cluster, batch, options, whole_experts)
    assert {candidate.layout.virtual_size for candidate in candidates} >= {1, 2}
    every = [other for item in candidates for other in _with_group_sizes(item)]
    truth = {item.layout.label(): _best_of(profile, cluster, item, batch) for item in every}
    best = min(step for step in truth.values() if step is not None)
    if whole_experts:
        assert {(item.layout.expert_size, item.layout.expert_tensor_size) for item in candidates} >= {(4, 1), (2, 0)}
        assert " ETP1" in next(label for label, step in truth.items() if step == best)
    plan = search(profile, cluster, batch, SearchOptions(space=options))
    assert plan.search.lower_bound_us <= best * (1 + 1e-9) <= plan.step.total_us * (1 + 2e-9)
    assert plan.step.total_us <= best / (1 - plan.search.gap_fraction) * (1 + 1e-9)
    assert plan.search.gap_fraction < 0.005
    for verdict in plan.search.verdicts:
        assert verdict.outcome in OUTCOMES and verdict.reason
        if verdict.outcome in ("illegal", "unmeasured", "excluded"):
            assert verdict.layout.label() not in truth
            continue
        step = truth[verdict.layout.label()]
        if verdict.outcome == "memory":
            assert step is None
        elif verdict.outcome == "bounded" and step is not None:
            assert verdict.lower_bound_us is not None
            assert max(verdict.lower_bound_us, best) <= step * (1 + 1e-9)
        elif verdict.outcome == "solved":
            assert verdict.step_us is not None and verdict.lower_bound_us is not None and step is not None
            assert verdict.lower_bound_us <= step * (1 + 1e-9) <= verdict.step_us * (1 + 2e-9)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_heavy_output_layer_gets_a_stage_of_its_own_where_the_host_runs_that(chunks: int) -> None:
    profile, cluster = _language_model(post_us=3000.0), Cluster(num_nodes=1, devices_per_node=2)
    layout = Layout(pipeline_size=2, virtual_size=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    plain, alone = (
        search(profile, cluster, 8, SearchOptions(layouts=[replace(layout, standalone_ends=ends)]))
        for ends in (False, True)
    )
    assert alone.layers_of("text_decoder")[-1] == 0 < plain.layers_of("text_decoder")[-1]
    assert alone.step.total_us < plain.step.total_us
    assert alone.search.status == plain.search.status == "optimal"
    again, found = replay(alone)
    assert again.step.total_us == pytest.approx(alone.step.total_us) and found.fits


def test_alternatives_are_the_next_best_layouts() -> None:
    profile, cluster, batch = small_profile(), Cluster(num_nodes=1, devices_per_node=4), 16
    plan = search(profile, cluster, batch, SearchOptions(top_k=3))
    every = search(profile, cluster, batch, SearchOptions(top_k=100))
    ranking = sorted([every.step.total_us, *(other.step_us for other in every.alternatives)])
    assert len(ranking) == 5
    assert [plan.step.total_us, *(other.step_us for other in plan.alternatives)] == pytest.approx(ranking[:4])


def test_all_forward_all_backward_is_searched_on_hosts_that_run_it() -> None:
    profile, cluster = small_profile(), Cluster(num_nodes=1, devices_per_node=4)
    plan = search(profile, cluster, 16, SearchOptions(space=SpaceOptions(schedules=("1f1b", "gpipe")), top_k=100))
    schedules = {layout.schedule for layout in (plan.layout, *(other.layout for other in plan.alternatives))}
    assert schedules == {"1f1b", "gpipe"}
    assert plan.step.total_us <= search(profile, cluster, 16).step.total_us * (1 + 1e-9)


def test_virtual_stages_are_searched_by_default_and_left_out_if_one_chunk_is_requested() -> None:
    profile, cluster = small_profile(), Cluster(num_nodes=1, devices_per_node=2)
    unasked = search(profile, cluster, 8)
    assert any(verdict.layout.virtual_size == 2 and verdict.outcome != "illegal" for verdict in unasked.search.verdicts)
    without = search(profile, cluster, 8, SearchOptions(space=SpaceOptions(virtual_sizes=(1,))))
    assert {verdict.layout.virtual_size for verdict in without.search.verdicts} == {1}
    assert unasked.step.total_us <= without.step.total_us


def test_a_host_without_group_sizes_gets_none() -> None:
    profile, cluster = _language_model(), Cluster(num_nodes=1, devices_per_node=2)
    for group_sizes in (True, False):
        space = SpaceOptions(virtual_sizes=(1, 2), group_sizes=group_sizes)
        plan = search(profile, cluster, 3, SearchOptions(space=space))
        grouped = [v.layout for v in plan.search.verdicts if v.layout.microbatch_group_size]
        assert bool(grouped) == group_sizes
        illegal = {v.reason for v in plan.search.verdicts if v.outcome == "illegal"}
        assert any("in groups of PP 2 to 3" in reason for reason in illegal) != group_sizes


def test_memory_decides_between_more_stages_and_more_recomputation() -> None:
    """The same search with more and more memory is never slower."""
    cluster, steps = Cluster(num_nodes=1, devices_per_node=4), []
    for capacity in (200, 260, 330, 600, 2000):
        limited = replace(cluster, memory_limit_bytes=capacity * MIB)
        try:
            steps.append(search(_language_model(), limited, 8, SearchOptions(with_relaxations=False)).step.total_us)
        except InfeasiblePlan:
            steps.append(float("inf"))
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) > 2


def _least_memory(candidate: Candidate) -> int:
    """The smallest peak of all placements, by enumeration."""
    peaks = []
    for row in _rows(candidate.layout.num_virtual_stages):
        for again in product(*(range(count + 1) for count in row)):
            placement = ModulePlacement(layers={"text_decoder": row}, recompute={"text_decoder": {"full": again}})
            ranks = range(candidate.layout.pipeline_size)
            peaks.append(max(memory_of_rank(candidate, placement, rank).peak_bytes for rank in ranks))
    return min(peaks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "distributed", "post_us"),
    [(2, True, 240.0), (2, False, 240.0), pytest.param(4, False, 240.0, marks=pytest.mark.long), (4, True, 1900.0)],
)
def test_the_nearest_layout_and_the_smallest_limit_are_those_of_enumeration(
    devices: int, distributed: bool, post_us: float
) -> None:
    profile, batch = _language_model(30, post_us), 4
    cluster = Cluster(num_nodes=1, devices_per_node=devices)
    space = SpaceOptions(distributed_optimizer=distributed)
    candidates, _ = enumerate_layouts(profile, cluster, batch, space)
    truth = {item.layout.label(): _least_memory(item) for item in candidates}
    least = min(truth.values())
    with pytest.raises(InfeasiblePlan) as caught:
        search(profile, cluster, batch, SearchOptions(space=space))
    text = str(caught.value)
    assert truth[text.split("Nearest is ")[1].split(":")[0]] == least
    smallest = -(-least // MIB)
    assert f"A memory limit of {smallest} MiB per device is enough" in text
    for limit, fits in ((smallest, True), (smallest - 1, False)):
        within = replace(cluster, memory_limit_bytes=limit * MIB)
        if fits:
            assert search(profile, within, batch, SearchOptions(space=space)).step.total_us > 0
        else:
            with pytest.raises(InfeasiblePlan):
                search(profile, within, batch, SearchOptions(space=space))
