"""Train a Megatron-LM checkout's own pretrain_gpt.py by an interleaved plan, and alone: losses must agree.

python tests/benchmarks/plan/interleaved_on_host.py CHECKOUT mtp PROFILE FOLDER --group 4

PROFILE is one that ``--auto-parallel-mm`` measured of that script (``profile.json`` in its work folder). The plan has 2 ranks of
2 chunks, embedding and output layer on stages of their own, and the group size asked for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "hosts"), str(ROOT / "helpers")]

from megatron_cells import Host  # noqa: E402

from mindspeed_autoparallel.planner.evaluate import evaluate  # noqa: E402
from mindspeed_autoparallel.planner.layouts.assembly import plan_of  # noqa: E402
from mindspeed_autoparallel.planner.placement import ModulePlacement  # noqa: E402
from mindspeed_autoparallel.planner.rank_memory import point_of  # noqa: E402
from mindspeed_autoparallel.profiles import Profile, read_profile  # noqa: E402
from mindspeed_autoparallel.spec import Cluster, Layout, Plan  # noqa: E402
from mindspeed_autoparallel.spec.plan import EDITED, SearchRecord  # noqa: E402

BATCH = 8


def plan_with(profile: Profile, group: int) -> Plan:
    """Return a plan with no layer on the first and the last of four virtual stages."""
    layout = Layout(
        pipeline_size=2, virtual_size=2, schedule="interleaved", microbatch_group_size=group, standalone_ends=True
    )
    measurement = point_of(profile, layout)
    assert measurement is not None
    (module,) = profile.model.modules
    half = module.num_layers // 2
    placement = ModulePlacement(layers={module.name: (0, half, module.num_layers - half, 0)}, recompute={})
    cluster = Cluster(num_nodes=1, devices_per_node=2)
    found = evaluate(profile, cluster, layout, placement, BATCH)
    record = SearchRecord(
        status=EDITED, lower_bound_us=0.0, gap_fraction=0.0, num_configurations=1, num_solved=0, seconds=0.0
    )
    return plan_of(profile, cluster, layout, measurement, found, BATCH, record)


def main() -> None:
    """Print the losses of both trainings, and Megatron's flags for the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model")
    parser.add_argument("profile", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", type=int, default=4)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    path = arguments.folder / "plan.json"
    plan_with(read_profile(arguments.profile), arguments.group).write(path)
    host = Host(sources=arguments.checkout, folder=arguments.folder)
    words = [str(host.script(arguments.model)), *host.flags(arguments.model)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    alone = host.run([*launcher, "1", *words])
    planned = host.run([*launcher, "2", *words, "--auto-parallel-plan", str(path)])
    print("alone  ", alone.exit_code, alone.losses)
    print("planned", planned.exit_code, planned.losses)
    print("\n".join(line for line in planned.output.splitlines() if line.startswith("as native flags")))
    sys.exit(planned.exit_code or alone.exit_code or planned.losses != alone.losses)


if __name__ == "__main__":
    main()
