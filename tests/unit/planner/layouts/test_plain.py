"""The best plain recipe equals a loop over all of them; a search that is interrupted hands over its best plan."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from language_profile import language_profile
from small_profile import small_profile

from mindspeed_autoparallel.interrupts import Stopped, Terminated, exit_code_of
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts import layout_search
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.units import MIB


def _fastest_by_loop(profile: Profile, cluster: Cluster, batch: int) -> float:
    """Return the step of the fastest recipe that fits: each layout with the least recompute that does, by kind."""
    best = inf
    candidates, _ = enumerate_layouts(profile, cluster, batch, SpaceOptions())
    *encoders, decoder = profile.model.modules
    for candidate in candidates:
        size = candidate.layout.pipeline_size
        each = -(-decoder.num_layers // size)
        rest = decoder.num_layers - each * (size - 1)
        if candidate.layout.virtual_size > 1 or rest < 1:
            continue
        layers = {module.name: (module.num_layers, *[0] * (size - 1)) for module in encoders}
        layers[decoder.name] = (*[each] * (size - 1), rest)
        kinds = sorted(set(candidate.measurement.modules[decoder.name].layer.recompute) - {"none"})
        recipes = [("", 0)] + [(k, n) for k in kinds for n in ((each,) if k != "full" else range(1, each + 1))]
        fitting: dict[str, float] = {}
        for kind, number in recipes:
            again = {name: {kind: tuple(min(number, n) for n in row)} if kind else {} for name, row in layers.items()}
            placement = ModulePlacement(layers=dict(layers), recompute=again)
            found = evaluate(profile, cluster, candidate.layout, placement, batch)
            if found.fits:
                fitting.setdefault(kind, found.step.total_us)
        best = min(best, fitting.get("", min(fitting.values(), default=inf)))
    return best


@pytest.mark.parametrize(
    ("make", "limit_mib"), [*((small_profile, limit) for limit in (240, 330, 500, 4000)), (language_profile, 40_000)]
)
def test_the_plain_recipe_is_that_of_a_loop_over_all(make: Callable[[], Profile], limit_mib: int) -> None:
    profile = make()
    cluster = Cluster(num_nodes=1, devices_per_node=4, memory_limit_bytes=limit_mib * MIB)
    expected = _fastest_by_loop(profile, cluster, 16)
    plan = search(profile, cluster, 16, SearchOptions(time_limit_s=4.0, with_relaxations=False))
    plain = [base for base in plan.baselines if base.name == "plain"]
    assert (expected == inf) == (not plain)
    if plain:
        assert plain[0].step_us == pytest.approx(expected)
        assert plain[0].layout is not None and plan.step.total_us <= expected


def test_an_interrupt_hands_over_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise Terminated(15)

    monkeypatch.setattr(layout_search.LayoutSearch, "expand", interrupted)
    with pytest.raises(Stopped) as caught:
        search(small_profile(), Cluster(num_nodes=2, devices_per_node=4), 16)
    plan = caught.value.plan
    plan.check()
    assert plan.search.status == "feasible" and plan.step.total_us < inf
    assert 0 < plan.search.lower_bound_us < plan.step.total_us
    assert exit_code_of(caught.value) == 143


def test_an_interrupt_before_any_plan_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mindspeed_autoparallel.planner.layouts.plain_search.PlainSearch.run", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        search(small_profile(), Cluster(num_nodes=2, devices_per_node=4), 16, SearchOptions(num_workers=1))
    assert not isinstance(caught.value, Stopped)
