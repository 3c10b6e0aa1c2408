"""A plan is input: no number of it can be changed into one that contradicts the others without being refused."""

import copy
import json
import random
from dataclasses import replace

import pytest
from example_plan import example_plan
from how_many import how_many

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.spec.codec import to_json
from mindspeed_autoparallel.spec.plan import Plan

FREE = {
    # Sizes that label the model: nothing else in the file follows from them.
    *("hidden_size", "tokens_per_sample", "num_heads", "num_kv_heads", "vocab_size", "num_parameters", "num_experts"),
    *("sequence_length", "deepstack_layers", "predecessors"),
    # Measured or chosen, and not derived: any value of at least 0 is one that a search could have written.
    *("seconds", "num_configurations", "num_solved", "forward_us", "backward_us", "bubble_fraction"),
    *("throughput_tokens_per_s_per_device", "p50_us", "p95_us", "runtime_overhead_bytes", "limit_bytes"),
    *("num_active_parameters", "operations_per_sample"),
    *("schema_version", "context_size", "expert_size", "expert_tensor_size", "microbatch_group_size"),
    *("recompute", "memory_limit_bytes", "first_layer", "bucket_elements", "num_distributed_optimizer_instances"),
    # What lost, and what would help.
    *("baselines", "alternatives", "verdicts", "relaxations", "extra"),
}
"""Keys whose value another plan could have beside all the same others. They are checked for impossible values alone."""
FACTORS = (0.5, 1.5, 3.0, 1e9)


def numbers(value, path=()):
    """Yield the path of every number in a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, (*path, index))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(value, path, new):
    """Copy only what lies on the way."""
    if not path:
        return new
    copied = copy.copy(value)
    copied[path[0]] = changed(value[path[0]], path[1:], new)
    return copied


PLAN = to_json(example_plan())
DERIVED = [path for path in numbers(PLAN) if FREE.isdisjoint(path)]


def test_the_plan_itself_is_accepted():
    assert Plan.parse(PLAN) == example_plan()


@pytest.mark.slow
def test_drawn_changes_of_derived_numbers_are_refused():
    drawn = random.Random(20261123)
    accepted = []
    for _ in range(how_many(300, 1000)):
        path, factor = drawn.choice(DERIVED), drawn.choice(FACTORS)
        old = at(PLAN, path)
        new = type(old)(old * factor) if old else 7
        if new == old:
            new = old + 7
        try:
            Plan.parse(changed(PLAN, path, new))
        except PlanError as error:
            assert "\n" not in str(error)
        else:
            accepted.append((path, old, new))
    assert accepted == []


@pytest.mark.slow
def test_no_number_of_a_plan_may_be_negative():
    for path in numbers(PLAN):
        if path[-1] != "gain_fraction":  # a change of a limit may cost
            with pytest.raises(PlanError):
                Plan.parse(changed(PLAN, path, -5 if isinstance(at(PLAN, path), int) else -5.0))


def test_switches_of_any_type_are_read_back():
    """A plan with computed costs names its training's switches: text, numbers and lists of them."""
    plan = example_plan()
    train = {"stack": "megatron-core", "micro_batch": 2, "fused": True, "kinds": ["a", 1.5], "none": None}
    plan = replace(plan, profile=replace(plan.profile, train=train))
    assert Plan.parse(json.loads(plan.text())) == plan
