"""The cost of a constraint is that of the plan searched without it; the pins give that plan's cuts."""

import json

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.constraints import ConstraintCost
from mindspeed_autoparallel.operators.costs import plan_cost

SIZES = ["--layers", "1", "--devices", "4", "--batch", "64", "--seq-length", "4096", "--search-mode", "exact"]


def priced(capsys, *flags):
    assert main(["operators", *SIZES, "--constraints", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)["constraints"]


def plan_with(pins):
    graph = preset_graph("llama2-7b", batch=64, sequence=4096, num_layers=1)
    return search_graph(graph, 4, search_mode="exact", pins=pins)


def test_a_pin_that_hurts_costs_the_difference_and_its_pin_gives_the_cheaper_plan(capsys):
    row = next(r for r in priced(capsys, "--pin", "layers.*.q:inner=4") if r["constraint"].startswith("--pin"))
    pinned, free = plan_cost(plan_with({"layers.*.q": {"inner": 4}})), plan_cost(plan_with({}))
    assert (row["with_us"], row["without_us"]) == (pinned.total_us, free.total_us)
    assert row["cost_us"] == pinned.total_us - free.total_us > 0
    pattern, _, rest = next(pin for pin in row["pins"] if ".q:" in pin).partition(":")
    axis, parts = rest.split("=")
    assert plan_cost(plan_with({pattern: {axis: int(parts)}})).total_us <= free.total_us * (1 + 1e-9)


def test_a_pin_that_the_search_takes_anyway_costs_nothing(capsys):
    parts = plan_with({}).degrees()["layers.0.q"]
    pin = "layers.0.q:" + ",".join(f"{axis}={count}" for axis, count in parts.items())
    row = next(r for r in priced(capsys, "--pin", pin) if r["constraint"].startswith("--pin"))
    assert row["cost_us"] == 0 and row["pins"] == []


def test_limits_and_the_layout_of_megatron_are_constraints(capsys):
    whole = plan_cost(plan_with({})).parameter_bytes
    rows = {r["constraint"]: r for r in priced(capsys, "--parameter-limit-gib", str(whole / 2**30))}
    (limit,) = (r for name, r in rows.items() if name.startswith("--parameter-limit-gib"))
    assert limit["cost_us"] == 0  # cutting weights is cheap, and the plan without the limit does it, too
    (layout,) = (r for name, r in rows.items() if name.startswith("one layout for all operators"))
    assert layout["with_us"] >= layout["without_us"] == limit["with_us"]


def test_one_line_gives_the_cost_or_that_a_plan_is_missing():
    lines = ConstraintCost("--pin q:rows=2", 200.0, 150.0, ("q:columns=2",)).lines()
    assert lines == ["constraint --pin q:rows=2: costs 50 us of 200 us (25.0%)", "    without it: --pin 'q:columns=2'"]
    assert "helps" in ConstraintCost("tied", 100.0, 120.0).lines()[0]
    assert ConstraintCost("limit", 1.0, None, note="no plan.").lines() == ["constraint limit: no plan."]
