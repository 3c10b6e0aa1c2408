"""A described run as a plan without a search: the prices of ``predict`` for the page of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import plan_of
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.predict.model_words import request_in_own_words
from mindspeed_autoparallel.predict.price import described
from mindspeed_autoparallel.predict.useful_work import useful_work
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan import EDITED, SearchRecord


def priced_plan(request: Mapping[str, object], extra_devices: tuple[Device, ...] = ()) -> Plan:
    """Return the plan whose layout, placement and switches are those of ``request``. Raises ``ConfigError``."""
    work = read_workload(request_in_own_words(request))
    device = find_device(work.gpu, extra_devices)
    run = described(work, device)
    measurement = point_of(run.profile, run.layout)
    assert measurement is not None
    single = replace(work, tensor_size=1, context_size=1, expert_size=1, expert_tensor_size=1)
    useful = useful_work([single], [False])
    name = request.get("id")
    model = replace(
        run.profile.model,
        name=name if isinstance(name, str) and name else run.profile.model.name,
        operations_per_sample=useful.operations,
    )
    profile = replace(run.profile, model=model)
    found = evaluate(profile, run.cluster, run.layout, run.placement, work.global_batch)
    record = SearchRecord(
        status=EDITED, lower_bound_us=0.0, gap_fraction=0.0, num_configurations=1, num_solved=1, seconds=0.0
    )
    return plan_of(profile, run.cluster, run.layout, measurement, found, work.global_batch, record)
