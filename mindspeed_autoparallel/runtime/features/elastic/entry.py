"""``--auto-parallel-elastic`` at the start of every process: plan for the processes there are, load, or be a spare."""

from __future__ import annotations

import argparse
import os

from mindspeed_autoparallel.runtime.features.elastic.apply import apply
from mindspeed_autoparallel.runtime.features.elastic.neighbour import watch_next_node
from mindspeed_autoparallel.runtime.features.elastic.plans import plan_for_world
from mindspeed_autoparallel.runtime.features.elastic.request import ElasticRequest, read_request
from mindspeed_autoparallel.runtime.features.elastic.spare import announce_end, wait_for_end
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.units import US_PER_MS


def prepare(arguments: argparse.Namespace) -> None:
    """Point ``arguments`` at the plan for this world and at the newest checkpoint; spare processes end here."""
    request = read_request(arguments)
    watch_next_node(request.folder, request.world)
    path, plan = plan_for_world(request, arguments)
    if request.world.rank >= plan.layout.num_devices:
        wait_for_end(request, plan)
    arguments.auto_parallel_plan = str(path)
    apply(arguments, request.plan, plan)
    if request.world.rank == 0:
        announce_end(request)
        print(_going_on(request, plan, arguments), flush=True)
    os.environ["WORLD_SIZE"] = str(plan.layout.num_devices)


def _going_on(request: ElasticRequest, plan: Plan, arguments: argparse.Namespace) -> str:
    world, used = request.world, plan.layout.num_devices
    spare = f", {world.size - used} of them spare" if used < world.size else ""
    loaded = f"loads {arguments.load}" if arguments.load else "starts anew"
    return (
        f"elastic: {world.size} processes on {world.num_nodes} nodes{spare}; {plan.layout.label()}, "
        f"{plan.step.total_us / US_PER_MS:.2f} ms a step predicted; {loaded}"
    )
