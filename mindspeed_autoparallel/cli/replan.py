"""Plan again after nodes were lost or added, and compare the gain with the cost of the move.

replan --plan plan.json --lost-node 3 --checkpoint ckpt --out replanned
replan --plan plan.json --nnodes 16 --remaining-hours 12 --out replanned
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli import _launch, _script
from mindspeed_autoparallel.cli._progress import code_after_interrupt, progress_of
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import json_text, made_folder
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.units import GIB, US_PER_MS, format_bytes

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.replan.choose import Option, Replanned
    from mindspeed_autoparallel.spec import Cluster, Plan
    from mindspeed_autoparallel.weights.whole_steps import SavedSteps

_SCRIPT_FILE = "relaunch.sh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="plan.json of the training")
    add("--lost-node", type=int, action="append", default=[], metavar="N", help="lost node, from 0 (repeatable)")
    add("--nnodes", type=int, help="present number of nodes, if the cluster grew or shrank")
    add("--nproc-per-node", type=int, help="devices per node (default: the plan's)")
    add(
        "--profile",
        type=Path,
        help="profile to plan with (default: plan.profile.json next to the plan, else the plan's costs)",
    )
    add("--checkpoint", type=Path, help="the training's --save folder; checks whether its newest step is complete")
    add("--hf-dir", type=Path, help="Hugging Face folder for the resplit command of rank folders")
    add("--remaining-hours", type=float, default=24.0, help="how long the new cluster is expected to last (default 24)")
    add("--storage-gib-per-s", type=float, default=2.0, help="GiB/s that a node reads checkpoints with (default 2)")
    add("--restart-s", type=float, default=60.0, help="seconds from start to first step without loading (default 60)")
    add("--time-limit-s", type=float, default=30.0, help="then end all searches with the best plan so far")
    add("--out", type=Path, help="directory for plan.json, the result file and launch lines")
    add("--json", action="store_true", help="print only JSON")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.planner.replan.choose import MoveRates, Window, replan
    from mindspeed_autoparallel.planner.replan.sources import costs_of
    from mindspeed_autoparallel.planner.results import write_results
    from mindspeed_autoparallel.spec import Plan

    old = Plan.read(arguments.plan)
    cluster = _cluster(arguments, old)
    rates = MoveRates(storage_bytes_per_s=arguments.storage_gib_per_s * GIB, restart_s=arguments.restart_s)
    _refuse_overwriting(arguments)
    saved = _saved(arguments, old)
    window = Window(hours=arguments.remaining_hours, files_are_cut=saved is not None and not saved.newest.is_torch_dist)
    profile, note = costs_of(old, arguments.plan, arguments.profile)
    if note:
        print(note, file=sys.stderr)
    code = 0
    try:
        found = replan(
            old, profile, cluster, rates, window, time_limit_s=arguments.time_limit_s, progress=progress_of(arguments)
        )
    except Stopped as stopped:
        found, code = stopped.plan, code_after_interrupt(stopped)
    lines = _orders(arguments, old, found, saved)
    if arguments.out is not None:
        made_folder(arguments.out, "--out")
        write_results(found.chosen.plan, arguments.out, profile if not note else None)
        if found.chosen.plan.hetero is None:
            _script.write_script(found.chosen.plan, arguments.out / _SCRIPT_FILE, None)
    if arguments.json:
        print(json.dumps(json.loads(json_text(_result(old, found, lines)))))
    else:
        _print(old, found, lines)
    return code


def _cluster(arguments: argparse.Namespace, old: Plan) -> Cluster:
    from mindspeed_autoparallel.planner.replan.sources import cluster_after_loss, cluster_of_nodes

    if bool(arguments.lost_node) == (arguments.nnodes is not None):
        raise ConfigError("give either --lost-node, once per lost node, or --nnodes, the number of remaining nodes.")
    if arguments.lost_node:
        if arguments.nproc_per_node is not None:
            raise ConfigError("--nproc-per-node is for --nnodes; --lost-node keeps the plan's devices per node.")
        return cluster_after_loss(old, arguments.lost_node)
    return cluster_of_nodes(old, arguments.nnodes, arguments.nproc_per_node)


def _refuse_overwriting(arguments: argparse.Namespace) -> None:
    out = arguments.out
    if out is not None and (out / "plan.json").resolve() == arguments.plan.resolve():
        raise ConfigError(f"--out {out} holds the training's plan; give another folder.")


def _saved(arguments: argparse.Namespace, old: Plan) -> SavedSteps | None:
    """Return the steps of ``--checkpoint``; prints a line to stderr if the newest is incomplete, raises if all are."""
    if arguments.checkpoint is None:
        return None
    from mindspeed_autoparallel.weights.whole_steps import loss_line, saved_steps

    saved = saved_steps(arguments.checkpoint, old)
    if saved.whole is None:
        raise ConfigError(loss_line(saved, arguments.checkpoint, old.cluster.devices_per_node))
    if saved.broken:
        print(loss_line(saved, arguments.checkpoint, old.cluster.devices_per_node), file=sys.stderr)
    return saved


def _orders(arguments: argparse.Namespace, old: Plan, found: Replanned, saved: SavedSteps | None) -> list[str]:
    """Return the lines to run, in order: the recut if files are cut for one layout, then the launch."""
    option, out = found.chosen, arguments.out or Path()
    if option.name == "stay":
        return []
    plan = option.plan
    lines, load = [], arguments.checkpoint
    if saved is not None and saved.whole is not None and not saved.whole.is_torch_dist and plan.stages != old.stages:
        load = arguments.checkpoint.with_name(arguments.checkpoint.name + "-recut")
        hf_dir = arguments.hf_dir or "HF_FOLDER"
        words = ["mindspeed-autoparallel", "convert", "resplit", saved.whole.folder, load, "--hf-dir", hf_dir]
        # Keeps the optimizer's state, which rank folders of another layout would lose.
        lines.append(shlex.join(map(str, [*words, "--plan", out / "plan.json", "--format", "torch_dist"])))
    loading = [] if load is None else ["--load", str(load)]
    if load != arguments.checkpoint:
        loading += ["--ckpt-format", "torch_dist"]
    if saved is not None and saved.broken and saved.whole is not None and load == arguments.checkpoint:
        loading += ["--ckpt-step", str(saved.whole.iteration)]
    if plan.hetero is None:
        lines.append(shlex.join(["bash", str(out / _SCRIPT_FILE), *loading]))
    else:
        words = ["--nnodes", plan.cluster.num_nodes, "--nproc-per-node", plan.cluster.devices_per_node]
        script = ["SCRIPT", "--auto-parallel-plan", out / "plan.json", *loading]
        lines.append(shlex.join(map(str, ["torchrun", *words, *script])))
    return lines


def _result(old: Plan, found: Replanned, lines: list[str]) -> dict[str, object]:
    from mindspeed_autoparallel.spec import to_json

    return {
        "nodes": found.cluster.num_nodes,
        "old_step_ms": old.mean_us / US_PER_MS,
        "options": [
            {
                "name": option.name,
                "layout": option.plan.layout.label(),
                "nodes_used": option.plan.cluster.num_nodes,
                "step_ms": option.plan.mean_us / US_PER_MS,
                "read_bytes": option.move.read_bytes,
                "sent_bytes": option.move.sent_bytes,
                "move_s": option.move.seconds,
                "steps": option.steps,
            }
            for option in found.options
        ],
        "run": lines,
        "plan": to_json(found.chosen.plan),
    }


def _print(old: Plan, found: Replanned, lines: list[str]) -> None:
    from mindspeed_autoparallel.report import render_table

    chosen = found.chosen
    print(f"now: {old.layout.label()} on {old.cluster.num_devices} devices, {old.mean_us / US_PER_MS:.2f} ms a step")
    print(render_table(chosen.plan), end="")
    unused = found.cluster.num_nodes - chosen.plan.cluster.num_nodes
    if unused:
        print(f"{unused} of {found.cluster.num_nodes} nodes remain unused: no faster plan with them was found")
    print(f"{'option':12s} {'layout':28s} {'step_ms':>10s} {'read':>10s} {'sent':>10s} {'move_s':>8s} {'steps':>10s}")
    for option in found.options:
        print(_row(option))
    if chosen.plan.hetero is None:
        print(_launch.flags_line(chosen.plan))
    for line in lines:
        print(f"run: {line}")
    if not lines:
        print("continue with the current plan: the move costs more than it gains in this time")


def _row(option: Option) -> str:
    move = option.move
    return (
        f"{option.name:12s} {option.plan.layout.label():28s} {option.plan.mean_us / US_PER_MS:10.2f} "
        f"{format_bytes(move.read_bytes):>10s} {format_bytes(move.sent_bytes):>10s} {move.seconds:8.1f} "
        f"{option.steps:10.0f}"
    )
