"""Find the best parallel plan for a cluster, with its proof.

plan --profile profile.json --nnodes 8 --nproc-per-node 16 --global-batch-size 256 --out . --json
plan --fsdp2 config.yaml --model config.json --device 910B --nnodes 2 --nproc-per-node 8 --out .
plan --model config.json --device H100 --train precision=fp8 --nnodes 8 --nproc-per-node 8 --global-batch-size 256
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli import _launch, _plan_answer, _plan_data, _profile_source, _script, _unused_flags
from mindspeed_autoparallel.cli._progress import code_after_interrupt, progress_of
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import json_text, made_folder, shown
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.spec.hetero import BALANCES
from mindspeed_autoparallel.units import MIB
from mindspeed_autoparallel.whole_numbers import COUNT, LARGE, MEMORY_MIB

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions
    from mindspeed_autoparallel.profiles import Profile
    from mindspeed_autoparallel.spec import Cluster, Layout, Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _profile_source.add_arguments(parser)
    add("--nnodes", type=COUNT, required=True, help="nodes to train on")
    add("--nproc-per-node", type=COUNT, required=True, help="devices per node")
    add("--global-batch-size", type=int, help="samples per step (default with --fsdp2: the file's)")
    add(
        "--fsdp2",
        type=Path,
        metavar="CONFIG",
        help="plan an FSDP2 trainer from its YAML (MindSpeed-MM, MindSpeed-LLM, VeOmni, NeMo Automodel, verl) or "
        "from the script that launches Megatron with --use-torch-fsdp2 or --use-megatron-fsdp",
    )
    add("--memory-limit-mib", type=MEMORY_MIB, help="limit per device (default: the profile's capacity)")
    _plan_answer.add_arguments(parser)
    add("--top-k", type=int, default=3, help="alternatives to report (default 3)")
    add("--seed", type=LARGE, default=0, help="seed of the solver")
    add(
        "--overlap-grad-reduce",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="overlap gradient reduction with the backward (default: on for computed profiles, off for measured ones)",
    )
    add(
        "--overlap-moe-expert-parallel-comm",
        action="store_true",
        help="also search Megatron's combined 1F1B, which hides expert exchanges behind another microbatch",
    )
    add(
        "--virtual-sizes",
        default="auto",
        help="chunks per rank to try within the time limit (default: 1,2,4, for a few seconds in large jobs)",
    )
    add("--schedules", default="1f1b", help="without virtual stages: 1f1b, or 1f1b,gpipe for a host that has both")
    add(
        "--no-standalone-ends",
        action="store_true",
        help="plan no stage of the embedding or the output layer alone, which only hosts with "
        "--pipeline-model-parallel-layout train",
    )
    add("--num-workers", type=int, default=0, help="processes (default: one per core); same plan")
    add("--candidate", type=Path, help="output of `operators --json`: also plan its Megatron layout")
    add(
        "--hetero-parallel",
        action="store_true",
        help="also search separate layouts for encoders, and compare with the best homogeneous plan",
    )
    add("--hetero-balance", choices=BALANCES, default="local", help="balance of the training")
    add("--mm-model", type=Path, help="model.json; hetero sizes are written to a copy next to it")
    _plan_data.add_arguments(parser)
    add("--out", type=Path, help="directory for plan.json and the result file")
    _script.add_argument(parser)
    add("--why", action="store_true", help="print the verdict of every layout")
    add("--json", action="store_true", help="print only JSON: the plan")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.planner.wanted import Wanted, find_plan
    from mindspeed_autoparallel.spec import Plan

    if arguments.time_limit_s is None:
        arguments.time_limit_s = 600.0 if arguments.fsdp2 is None else 60.0
    tokens = _plan_answer.tokens(arguments.tokens)
    _script.check(arguments)
    virtual_sizes = _virtual_sizes(arguments.virtual_sizes)
    cluster = _cluster(arguments)
    if arguments.out is not None:
        made_folder(arguments.out, "--out")
    if arguments.fsdp2 is not None:
        from mindspeed_autoparallel.cli._plan_sharded import run_sharded

        return run_sharded(arguments, cluster)
    if arguments.global_batch_size is None:
        raise ConfigError("--global-batch-size, the samples per step, is missing.")
    if not arguments.hetero_parallel:
        _unused_flags.refuse(arguments, ("hetero_balance", "mm_model"), "only --hetero-parallel uses this.")
    profile = _profile_source.read_profile_of(arguments)
    cluster = _plan_answer.with_margin(arguments, profile, cluster)
    options = _options(arguments, profile, virtual_sizes)
    _plan_data.check(arguments)
    candidate = _candidate(arguments)
    data = None if arguments.data is None else _plan_data.read(arguments)
    wanted = Wanted(cluster=cluster, global_batch_size=arguments.global_batch_size, options=options, data=data)
    if arguments.hetero_parallel:
        from mindspeed_autoparallel.cli._plan_hetero import run_hetero

        return run_hetero(arguments, profile, wanted, lambda plan: _finish(arguments, plan, profile, tokens))

    code = 0
    try:
        found = find_plan(profile, wanted, progress_of(arguments))
        plan = found if isinstance(found, Plan) else found.best
        if candidate is not None:
            plan = _with_candidate(arguments, candidate, plan, profile, cluster)
    except Stopped as stopped:
        plan, code = stopped.plan, code_after_interrupt(stopped)
    _finish(arguments, plan, profile, tokens)
    return code


def _finish(arguments: argparse.Namespace, plan: Plan, profile: Profile, tokens: float | None) -> None:
    """Write and print ``plan`` as requested by the flags."""
    from mindspeed_autoparallel.planner.results import write_results
    from mindspeed_autoparallel.report import render_table
    from mindspeed_autoparallel.spec import to_json

    plan = _profile_source.with_unoverlapped_step(arguments, plan)
    if arguments.out is not None:
        write_results(plan, arguments.out, profile)
    shape = _profile_source.model_shape(arguments)
    if arguments.script is not None:
        _script.write_script(plan, arguments.script, shape, _launch.release_of(arguments.megatron_release))
    if arguments.json:
        print(json.dumps(json.loads(json_text(to_json(plan)))))
        return
    print(render_table(plan, tokens, with_verdicts=arguments.why), end="")
    print(_launch.flags_line(plan, _script.mtp_layers(shape)))


def _cluster(arguments: argparse.Namespace) -> Cluster:
    from mindspeed_autoparallel.spec import Cluster

    return Cluster(
        num_nodes=arguments.nnodes,
        devices_per_node=arguments.nproc_per_node,
        memory_limit_bytes=_limit_bytes(arguments),
    )


def _options(arguments: argparse.Namespace, profile: Profile, virtual_sizes: tuple[int, ...] | None) -> SearchOptions:
    """Return the search options that the flags set."""
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions
    from mindspeed_autoparallel.planner.layouts.space import SpaceOptions

    return SearchOptions(
        time_limit_s=arguments.time_limit_s,
        top_k=arguments.top_k,
        seed=arguments.seed,
        num_workers=arguments.num_workers,
        space=SpaceOptions(
            overlap_gradient_reduce=_overlaps(arguments, profile),
            virtual_sizes=virtual_sizes,
            standalone_ends=not arguments.no_standalone_ends,
            schedules=_schedules(arguments.schedules),
            paired=arguments.overlap_moe_expert_parallel_comm,
        ),
    )


def _candidate(arguments: argparse.Namespace) -> Layout | None:
    """Return the layout of ``--candidate``, read before anything is searched."""
    if arguments.candidate is None:
        return None
    if arguments.hetero_parallel:
        raise ConfigError("--candidate is one layout for all modules; plan it without --hetero-parallel.")
    from mindspeed_autoparallel.operators.candidate import read_candidate

    return read_candidate(arguments.candidate)


def _with_candidate(
    arguments: argparse.Namespace, candidate: Layout, plan: Plan, profile: Profile, cluster: Cluster
) -> Plan:
    """Return the better of ``plan`` and the layout that an operator search lowered to; prints how they compare."""
    from mindspeed_autoparallel.operators.candidate import with_candidate
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions

    plan, compared = with_candidate(
        plan,
        candidate,
        profile,
        cluster,
        arguments.global_batch_size,
        SearchOptions(time_limit_s=arguments.time_limit_s, seed=arguments.seed),
    )
    print(compared, file=sys.stderr)
    return plan


def _limit_bytes(arguments: argparse.Namespace) -> int | None:
    limit = arguments.memory_limit_mib
    return int(limit * MIB) if limit is not None else None


def _overlaps(arguments: argparse.Namespace, profile: Profile) -> bool:
    """Return whether gradient reduction overlaps the backward: as requested, else the default of
    ``predict.switches``."""
    wanted: bool | None = arguments.overlap_grad_reduce
    return profile.provenance.source == "analytic" if wanted is None else wanted


def _schedules(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not set(words) <= {"1f1b", "gpipe"}:
        raise ConfigError(f"--schedules must be 1f1b, gpipe or both separated by a comma, got {text!r}.")
    return words


def _virtual_sizes(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 5 and int(word) > 0 for word in words):
        raise ConfigError(
            f"--virtual-sizes must be auto or positive numbers separated by commas, got {shown(repr(text))}."
        )
    return tuple(sorted({int(word) for word in words}))
