"""ZeRO-2 and ZeRO-3: bytes and times by hand, and against a simulation of its own."""

import random
from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.cost.collectives import data_parallel_link
from mindspeed_autoparallel.cost.memory import PlacedBlock, rank_peak, static_terms
from mindspeed_autoparallel.cost.sharding import Unit, gathered_bytes, microbatch_us, reach_of, units_of, waiting_bytes
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.bounds import pipeline_bound_ns, sharding_bound_us, tail_bound_us
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import BlockCost, Collective, DeviceCost, LinkTier, RecomputeCost, StateBytes
from mindspeed_autoparallel.schedule import make_program
from mindspeed_autoparallel.spec import Cluster, Layout, Sharding

TIER = LinkTier(default=Collective(latency_us=1.0, bytes_per_s=1e9))
DEVICE = DeviceCost(memory_capacity_bytes=10**9, intra=TIER, inter=TIER)
STATE = StateBytes(num_parameters=10, parameter_bytes=20, gradient_bytes=40, optimizer_bytes=120)


def block(name: str, state: StateBytes = STATE) -> PlacedBlock:
    cost = BlockCost(
        forward_us=10.0,
        backward_us=20.0,
        dense=state,
        recompute={"none": RecomputeCost(saved_bytes=100, forward_peak_bytes=5, backward_peak_bytes=30)},
    )
    return PlacedBlock(name=f"text {name}", cost=cost)


MODEL = [block("pre"), block("layer 0"), block("layer 1"), block("layer 2"), block("post")]
WHOLE = Sharding(parameters=True, communication_unit=20)
GRADIENTS = Sharding(parameters=False, communication_unit=20)


def test_state_is_split_over_data_and_context_ranks_and_blocks_without_unit_stay_gathered():
    layout = Layout(data_size=2, context_size=2, sharding=WHOLE)
    assert static_terms(MODEL, layout) == {"parameters": 5 * 5 + 2 * 20, "gradients": 5 * 10, "optimizer": 5 * 30}
    layout = Layout(data_size=2, context_size=2, sharding=GRADIENTS)
    assert static_terms(MODEL, layout) == {"parameters": 5 * 20, "gradients": 5 * 10, "optimizer": 5 * 30}


def test_expert_state_is_split_over_the_ranks_that_hold_the_same_experts():
    expert = replace(MODEL[1], cost=replace(MODEL[1].cost, dense=StateBytes(), expert=STATE))
    terms = static_terms([expert], Layout(data_size=4, expert_size=2, sharding=WHOLE))
    assert terms == {"parameters": 10, "gradients": 20, "optimizer": 60}


def test_one_unit_ahead_is_gathered_and_none_before_the_head_in_backward():
    # Half a communication unit is one layer of 10 elements.
    assert gathered_bytes(MODEL, WHOLE) == {"F": [20, 40, 40, 20, 0], "B": [0, 20, 40, 40, 0]}
    everything = replace(WHOLE, communication_unit=10**9)
    assert gathered_bytes(MODEL, everything) == {"F": [60, 60, 40, 20, 0], "B": [0, 20, 40, 60, 0]}
    assert gathered_bytes(MODEL, GRADIENTS) == {"F": [0] * 5, "B": [0] * 5}


def test_gradients_wait_whole_until_more_than_a_communication_unit_is_queued():
    # From the head backwards: own, then one, two and three (30 elements) queued; then the oldest is freed.
    assert waiting_bytes(MODEL, WHOLE) == [160, 160, 120, 80, 40]
    assert waiting_bytes(MODEL, replace(WHOLE, communication_unit=1)) == [80, 80, 80, 80, 40]
    assert waiting_bytes(MODEL, replace(WHOLE, communication_unit=10**9)) == [200, 160, 120, 80, 40]


def test_peak_adds_what_is_gathered_and_waiting_where_it_is():
    layout = Layout(data_size=4, sharding=WHOLE)
    peak = rank_peak([MODEL], make_program("1f1b", 1, 2)[0], layout, DEVICE)
    static = sum(static_terms(MODEL, layout).values())
    heights = [100 * (place + 1) + 30 for place in range(5)]
    extra = [sum(pair) for pair in zip(gathered_bytes(MODEL, WHOLE)["B"], waiting_bytes(MODEL, WHOLE), strict=True)]
    assert peak.peak_bytes == static + max(sum(pair) for pair in zip(heights, extra, strict=True))
    assert sum(peak.terms.values()) == peak.peak_bytes


def test_a_microbatch_by_hand():
    units = [Unit(forward_us=10, backward_us=20, gather_us=4, reduce_us=6) for _ in range(3)]
    reach = reach_of([block(f"layer {index}") for index in range(3)], WHOLE)
    # Forward: the first gather shows (4), the next two hide. Backward: the last layer is gathered anew (4), two gathers
    # and two reductions hide, the reduction of the first layer shows (6).
    assert microbatch_us(units, reach) == (34, 70)


def by_tasks(units, reach):
    """The same by the longest path over tasks: each has what it waits for; a queue is a chain."""
    tasks, ends = [], {}
    computing, moving = [], []

    def add(name, time_us, waits, queue):
        tasks.append((name, time_us, [*waits, *queue[-1:]]))
        queue.append(name)

    for kind, order in (("F", list(range(len(units)))), ("B", list(reversed(range(len(units)))))):
        gathered = set()
        for place in order:
            wanted = range(place, reach.last[place] + 1) if kind == "F" else range(place, reach.first[place] - 1, -1)
            for other in wanted:
                if units[other].gather_us and (kind, other) not in gathered:
                    gathered.add((kind, other))
                    add(("gather", kind, other), units[other].gather_us, computing[-1:], moving)
            waits = [("gather", kind, place)] if (kind, place) in gathered else []
            time_us = units[place].forward_us if kind == "F" else units[place].backward_us
            add((kind, place), time_us, waits, computing)
            if kind == "B" and units[place].reduce_us:
                add(("reduce", place), units[place].reduce_us, computing[-1:], moving)
    for name, time_us, waits in tasks:
        ends[name] = max((ends[other] for other in waits), default=0.0) + time_us
    return max(ends.values())


def test_any_microbatch_takes_the_longest_path_and_no_less_than_either_queue_alone():
    draw = random.Random(7)
    for _ in range(200):
        count = draw.randint(1, 7)
        blocks = [block("pre"), *(block(f"layer {index}") for index in range(count)), block("post")]
        units = [
            Unit(
                forward_us=draw.uniform(1, 10),
                backward_us=draw.uniform(1, 20),
                reduce_us=draw.uniform(0, 30),
                gather_us=draw.uniform(0.5, 20) if "layer" in item.name else 0.0,
            )
            for item in blocks
        ]
        reach = reach_of(blocks, replace(WHOLE, communication_unit=draw.choice([2, 20, 40, 10**9])))
        total = sum(microbatch_us(units, reach))
        assert total == pytest.approx(by_tasks(units, reach))
        computing = sum(unit.forward_us + unit.backward_us for unit in units)
        moving = sum(2 * unit.gather_us + unit.reduce_us for unit in units)
        assert max(computing, moving) <= total * (1 + 1e-12)
        assert total <= (computing + moving) * (1 + 1e-12)


def evaluated(layout, share=1.0, batch=32, **changes):
    profile = language_profile(num_layers=6, tensor=(layout.tensor_size,), batches=(1,), **changes)
    profile = replace(profile, device=replace(profile.device, hidden_share=share))
    cluster = Cluster(num_nodes=2, devices_per_node=4)
    placement = ModulePlacement(layers={"text_decoder": (6,)}, recompute={})
    return profile, cluster, evaluate(profile, cluster, layout, placement, batch)


@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("batch", [8, 64])
def test_no_step_is_faster_than_its_bounds(parameters, share, batch):
    layout = Layout(data_size=8, sharding=Sharding(parameters=parameters))
    profile, cluster, evaluation = evaluated(layout, share, batch)
    (candidate,), _ = enumerate_layouts(profile, cluster, batch, SpaceOptions(), [layout])
    bound = max(pipeline_bound_ns(candidate) / 1000, sharding_bound_us(candidate))
    bound += tail_bound_us(candidate)
    assert bound <= evaluation.step.total_us * (1 + 1e-6)


def test_a_step_is_microbatches_gathers_and_optimizer():
    layout = Layout(data_size=8, sharding=Sharding(parameters=True))
    profile, cluster, evaluation = evaluated(layout, share=0.0)
    module = profile.measurements[0].modules["text_decoder"]
    names = ["pre", *["layer 0"] * 6, "post"]
    costs = [module.pre, *[module.layer] * 6, module.post]
    blocks = [PlacedBlock(name=f"text_decoder {name}", cost=cost) for name, cost in zip(names, costs, strict=True)]
    times = [(cost.forward_us, cost.backward_us) for cost in costs]
    units = units_of(blocks, times, layout, data_parallel_link(layout, cluster, profile.device))
    each = sum(unit.forward_us + unit.backward_us + 2 * unit.gather_us + unit.reduce_us for unit in units)
    assert evaluation.step.pipeline_us == pytest.approx(4 * each, rel=1e-6)


def test_counting_on_less_is_slower_and_sharding_more_takes_less_memory():
    layout = Layout(data_size=8, sharding=Sharding(parameters=True, communication_unit=4 * 10**8))
    steps = [evaluated(layout, share)[2].step.total_us for share in (1.0, 0.5, 0.0)]
    assert steps == sorted(steps)
    assert len(set(steps)) == 3
    peaks = [
        evaluated(replace(layout, sharding=sharding))[2].memory[0].peak_bytes
        for sharding in (None, replace(layout.sharding, parameters=False), layout.sharding)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_more_than_one_stage_is_refused():
    with pytest.raises(ConfigError, match="ZeRO-3 is modelled for one pipeline stage, got 2"):
        Layout(pipeline_size=2, sharding=Sharding(parameters=True))
