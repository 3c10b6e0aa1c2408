"""Run each distinct rank of a plan, or of your script's own layout, alone on this device, and report whether it fits.

preflight plan.json -- pretrain_gpt.py <the script's own arguments>
preflight --devices 1024 --ranks ends -- pretrain_gpt.py <the script's own arguments>
preflight plan.json -- mindspeed_mm/fsdp/train/trainer.py config.yaml
preflight --result preflight_result.json --memory-limit-mib 40960

Equivalent to the script with --auto-parallel-preflight. The last form compares a finished pre-flight with another limit
and runs nothing. Exits with 0 if all ranks fit, 3 if a rank runs out of memory, 1 if a rank did not finish.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from mindspeed_autoparallel.cli._unused_flags import refuse
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles.records import record_of
from mindspeed_autoparallel.units import MIB
from mindspeed_autoparallel.whole_numbers import MEMORY_MIB

_ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
"""Variables that a native FSDP2 trainer reads before its plugin starts, and that torchrun would set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("arguments", nargs="*", metavar="PLAN -- SCRIPT ARGUMENT", help="the command that starts the training")
    add("--plan", type=Path, metavar="FILE", help="the plan to check (default: the script's own layout)")
    add("--devices", type=int, metavar="N", help="devices of the training, if there is no plan")
    add("--ranks", default="distinct", help="ranks to run: distinct, ends, or numbers such as 0,37")
    add(
        "--memory-limit-mib",
        type=MEMORY_MIB,
        metavar="MIB",
        help="memory limit per device (default: the plan's, or this device's)",
    )
    add("--out", type=Path, default=Path(), metavar="DIR", help="folder of preflight_result.json (default: .)")
    add("--result", type=Path, metavar="FILE", help="preflight_result.json of a finished pre-flight")


def run(arguments: argparse.Namespace) -> int:
    """Start the script with the flags of the pre-flight, or compare a finished one with another limit."""
    if arguments.result is not None:
        return _judge_again(arguments)
    words = list(arguments.arguments)
    plan = arguments.plan
    if plan is None and words and words[0].endswith(".json"):
        plan = Path(words.pop(0))
    if not words:
        raise ConfigError("the training script is missing: give it and its arguments after --.")
    if not Path(words[0]).is_file():
        raise ConfigError(f"{words[0]} is not a file; give the training script after --.")
    if plan is not None:
        _check_plan(plan, arguments)
    native = any(word.endswith((".yaml", ".yml")) for word in words[1:2])
    environment = {**_ONE_PROCESS, "NON_MEGATRON": "true", **os.environ} if native else None
    return subprocess.run([sys.executable, *words, *_flags(arguments, plan)], env=environment, check=False).returncode


def _flags(arguments: argparse.Namespace, plan: Path | None) -> list[str]:
    words = ["--auto-parallel-preflight"]
    if plan is not None:
        words.append(str(plan))
    words += ["--auto-parallel-preflight-ranks", arguments.ranks, "--auto-parallel-output-dir", str(arguments.out)]
    if arguments.devices is not None:
        words += ["--simulated-nnodes", "1", "--simulated-nproc-per-node", str(arguments.devices)]
    if arguments.memory_limit_mib is not None:
        words += ["--auto-parallel-memory-limit-mib", f"{arguments.memory_limit_mib:.17g}"]
    return words


def _check_plan(path: Path, arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` or ``PlanError`` before the script starts, which may take long."""
    from mindspeed_autoparallel.spec.plan import Plan
    from mindspeed_autoparallel.spec.sharded_plan import SHARDED_PLAN_FORMAT, ShardedPlan

    if arguments.devices is not None:
        raise ConfigError(f"--devices {arguments.devices}: {path} has its own number of devices; remove --devices.")
    content = read_json(path, "plan")
    if isinstance(content, dict) and content.get("format") == SHARDED_PLAN_FORMAT:
        ShardedPlan.read(path)
    else:
        Plan.read(path)


def _judge_again(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.profiles.preflight_result import EXIT_CODES, PreflightResult, judge

    path = arguments.result
    if arguments.memory_limit_mib is None or arguments.arguments:
        raise ConfigError(f"--result {path} takes --memory-limit-mib and no script: nothing is run.")
    refuse(arguments, ("plan", "devices", "ranks", "out"), "--result runs nothing.")
    result = record_of(read_json(path, "result of a pre-flight"), str(path), PreflightResult)
    limit = int(arguments.memory_limit_mib * MIB)
    verdict, text = judge(result.ranks, limit, "--memory-limit-mib", result.world_size)
    print(f"{result.layout} on {result.world_size} devices, measured on {result.device}")
    print(f"verdict: {text}")
    return EXIT_CODES[verdict]
