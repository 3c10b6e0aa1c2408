"""Train a Megatron-LM checkout's own pretrain_gpt.py by an interleaved plan, and alone: losses must agree.

python tests/benchmarks/plan/interleaved_on_host.py CHECKOUT mtp PROFILE FOLDER --group 4
python tests/benchmarks/plan/interleaved_on_host.py CHECKOUT mtp computed FOLDER --ranks 3 --layers 1,1,1,1,0,0 --prediction 4

PROFILE is one that ``--auto-parallel-mm`` measured of that script (``profile.json`` in its work folder), or ``computed``. The
plan has 2 ranks of 2 chunks, embedding and output layer on stages of their own, and the group size asked for; or ``--layers`` on
the virtual stages of ``--ranks``, with the layer of multi-token prediction on one that is not the loss's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "hosts"), str(ROOT / "helpers")]

from megatron_cells import Host  # noqa: E402

from mindspeed_autoparallel.cost.catalogue import find_device  # noqa: E402
from mindspeed_autoparallel.planner.evaluate import evaluate  # noqa: E402
from mindspeed_autoparallel.planner.layouts.assembly import plan_of  # noqa: E402
from mindspeed_autoparallel.planner.placement import ModulePlacement  # noqa: E402
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile  # noqa: E402
from mindspeed_autoparallel.predict.model_file import Section  # noqa: E402
from mindspeed_autoparallel.profiles import Profile, read_profile  # noqa: E402
from mindspeed_autoparallel.spec import Cluster, Layout, Plan  # noqa: E402
from mindspeed_autoparallel.spec.plan_records import EDITED, SearchRecord  # noqa: E402

BATCH = 8


def computed_profile() -> Profile:
    """Return costs by formula of a model of the script's depth: its width decides nothing here."""
    sizes = {"num_layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "seq": 64, "vocab": 1024, "mtp_layers": 1}
    return analytic_profile((Section("text_decoder", {**sizes, "tied_embeddings": False}),), find_device("H100"), 8)


def plan_with(profile: Profile, layout: Layout, layers: tuple[int, ...], prediction: int | None) -> Plan:
    """Return a plan with ``layers`` on the virtual stages, and prediction on one of them or with the loss."""
    (module,) = profile.model.modules
    placement = ModulePlacement(layers={module.name: layers}, recompute={}, prediction_stage=prediction)
    cluster = Cluster(num_nodes=1, devices_per_node=layout.pipeline_size)
    found = evaluate(profile, cluster, layout, placement, BATCH)
    record = SearchRecord(
        status=EDITED, lower_bound_us=0.0, gap_fraction=0.0, num_configurations=1, num_solved=0, seconds=0.0
    )
    return plan_of(profile, cluster, layout, found, BATCH, record)


def main() -> None:
    """Print the losses of both trainings, and Megatron's flags for the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model")
    parser.add_argument("profile")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--layers", default="0,2,2,0")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prediction", type=int)
    arguments = parser.parse_args()
    layers = tuple(map(int, arguments.layers.split(",")))
    chunks = len(layers) // arguments.ranks
    layout = Layout(
        pipeline_size=arguments.ranks,
        virtual_size=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        microbatch_group_size=arguments.group if chunks > 1 else 0,
        standalone_ends=True,
    )
    arguments.folder.mkdir(exist_ok=True)
    path = arguments.folder / "plan.json"
    profile = computed_profile() if arguments.profile == "computed" else read_profile(Path(arguments.profile))
    plan_with(profile, layout, layers, arguments.prediction).write(path)
    host = Host(sources=arguments.checkout, folder=arguments.folder)
    words = [str(host.script(arguments.model)), *host.flags(arguments.model)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    alone = host.run([*launcher, "1", *words])
    planned = host.run([*launcher, str(arguments.ranks), *words, "--auto-parallel-plan", str(path)])
    print("alone  ", alone.exit_code, alone.losses)
    print("planned", planned.exit_code, planned.losses)
    print("\n".join(line for line in planned.output.splitlines() if line.startswith("as native flags")))
    sys.exit(planned.exit_code or alone.exit_code or planned.losses != alone.losses)


if __name__ == "__main__":
    main()
