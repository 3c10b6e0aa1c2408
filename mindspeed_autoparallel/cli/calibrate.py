"""Measure operators and collectives on this machine's devices, or calibrate a device's figures with training logs.

With BASE.sqlite: measured and added to that knowledge base. With --from-log: steps of your own runs, whose arguments
Megatron prints at the top, change the catalogue's figures of the device, with uncertainty and where they come from.

OPERATORS.json holds {"operators": [{"name", "signature", "sizes"}]}; --auto-tuning writes it as missing_operators.json.
Without it only collectives are sampled.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from mindspeed_autoparallel.cli._from_log import add_log_arguments, run_from_log
from mindspeed_autoparallel.whole_numbers import LARGE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("base", type=Path, nargs="?", metavar="BASE.sqlite")
    parser.add_argument(
        "--operators", type=Path, metavar="OPERATORS.json", help="file of the operator calls to measure"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="devices of this node (default 1)")
    parser.add_argument(
        "--timeout-s",
        type=LARGE,
        default=1800,
        metavar="S",
        help="seconds after which the launch is stopped",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    add_log_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate in one launch on this node and print what was added."""
    from mindspeed_autoparallel.errors import ConfigError
    from mindspeed_autoparallel.files import read_json
    from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
    from mindspeed_autoparallel.runtime.profiling.calibrate.command import calibrate

    if arguments.from_log:
        if arguments.base is not None:
            raise ConfigError("--from-log measures nothing: leave BASE.sqlite out, give --output for what is learnt.")
        return run_from_log(arguments)
    if arguments.base is None:
        raise ConfigError("nothing to do: give BASE.sqlite to measure, or --from-log to learn from training logs.")
    if arguments.processes < 1 or arguments.timeout_s < 1:
        raise ConfigError("--processes and --timeout-s must be at least 1.")
    operators: list[object] = []
    if arguments.operators is not None:
        document = read_json(arguments.operators, "list of operators")
        given = document.get("operators") if isinstance(document, dict) else None
        if not isinstance(given, list):
            raise ConfigError(f'{arguments.operators} must hold {{"operators": [...]}}.')
        operators = given
    elif arguments.processes == 1:
        raise ConfigError("nothing to measure: give --operators, or --processes above 1 for collectives.")
    result = calibrate(KnowledgeBase(arguments.base), operators, arguments.processes, arguments.timeout_s)
    if arguments.json:
        print(json.dumps(asdict(result)))
        return 0
    print(
        f"{result.num_operators} operators and {result.num_collectives} samples of collectives added for "
        f"{result.device} ({result.software}) in {result.seconds:.0f} s"
    )
    for reason in result.failed:
        print(f"  not measured: {reason}")
    return 0
