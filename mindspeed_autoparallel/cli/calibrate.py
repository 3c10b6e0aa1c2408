"""Measure operators and collectives on this machine's devices, or calibrate a device's figures with training logs.

With BASE.sqlite: add measurements to that knowledge base. With --from-log: adjust the catalogue's figures of the device
to the steps of your runs, whose logs start with Megatron's arguments; each figure has an uncertainty and a source.

OPERATORS.json holds {"operators": [{"name", "signature", "sizes"}]}; --auto-tuning writes it as missing_operators.json.
Without it only collectives are sampled.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.cli._unused_flags import refuse
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.whole_numbers import COUNT, LARGE_COUNT

if TYPE_CHECKING:
    from mindspeed_autoparallel.cost.device import Device
    from mindspeed_autoparallel.predict.calibration import Calibration
    from mindspeed_autoparallel.predict.observations import Observation
    from mindspeed_autoparallel.predict.training_log import TrainingLog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("base", type=Path, nargs="?", metavar="BASE.sqlite", help="knowledge base to add measurements to")
    add("--operators", type=Path, metavar="OPERATORS.json", help="file of the operator calls to measure")
    add("--processes", type=COUNT, default=1, metavar="N", help="devices of this node (default 1)")
    add("--timeout-s", type=LARGE_COUNT, default=1800, metavar="S", help="seconds after which the launch is stopped")
    add("--json", action="store_true", help="print JSON only")
    _add_log_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate in one launch on this node and print the number of samples added."""
    from mindspeed_autoparallel.files import read_json
    from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
    from mindspeed_autoparallel.runtime.profiling.calibrate.command import calibrate

    if arguments.from_log:
        if arguments.base is not None:
            raise ConfigError(
                "--from-log measures nothing: remove BASE.sqlite; --output names the device file to write."
            )
        refuse(arguments, ("operators", "processes", "timeout_s"), "--from-log measures nothing.")
        return _learn(arguments)
    if arguments.base is None:
        raise ConfigError("nothing to do: give BASE.sqlite to measure, or --from-log to calibrate from training logs.")
    of_logs = ("device", "device_file", "nproc_per_node", "network_gbit_per_s", "output")
    refuse(arguments, of_logs, "only --from-log reads it; BASE.sqlite is calibrated on this machine's device.")
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


def _add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that belong to ``--from-log``."""
    group = parser.add_argument_group("from training logs (no device is needed)")
    add = group.add_argument
    add("--from-log", type=Path, nargs="+", metavar="LOG", help="training logs of Megatron or MindSpeed, also gzip")
    add("--device", metavar="NAME", help="the device that trained, from the catalogue")
    add("--device-file", type=Path, metavar="FILE", help="device file to start from")
    add("--nproc-per-node", type=COUNT, default=8, metavar="N", help="devices per node")
    add("--network-gbit-per-s", type=float, metavar="RATE", help="network of one node (default: the catalogue's)")
    add("--output", type=Path, metavar="DEVICE.json", help="calibrated device file to write")


def _learn(arguments: argparse.Namespace) -> int:
    """Read the logs, fit, print the changes, and write the device file if requested."""
    from mindspeed_autoparallel.predict.calibration import calibrate_device, observations_to_extend, store

    device = _device(arguments)
    known = observations_to_extend(arguments.output, device) if arguments.output else []
    told, failed = _read_logs(arguments, device)
    sources = {item.source for item in known}
    taken = known + [item for _, item in told if item.source not in sources]
    result = calibrate_device(device, taken)
    if arguments.output:
        store(arguments.output, result, taken, device)
    document = {**_document(device, result, taken, told), "not_used": failed}
    document["output"] = str(arguments.output) if arguments.output else None
    print(json.dumps(document) if arguments.json else "\n".join(_lines(document, len(known))))
    return 0


def _device(arguments: argparse.Namespace) -> Device:
    """Return the device whose figures the logs are to change."""
    from mindspeed_autoparallel.cost.catalogue import find_device, read_device
    from mindspeed_autoparallel.predict.calibration import stored_observations

    if arguments.device_file is None and arguments.device is None:
        raise ConfigError("logs do not name the device: give --device (such as Ascend-910B) or --device-file.")
    if arguments.device_file and stored_observations(arguments.device_file):
        raise ConfigError(
            f"{arguments.device_file} was itself calibrated from logs; start from --device, and give the file as "
            "--output: its logs are used with the new ones."
        )
    return read_device(arguments.device_file) if arguments.device_file else find_device(arguments.device)


def _read_logs(
    arguments: argparse.Namespace, device: Device
) -> tuple[list[tuple[TrainingLog, Observation]], list[str]]:
    """Return the usable logs with their measurements, and the reasons against the others."""
    from mindspeed_autoparallel.predict.observations import observation_of
    from mindspeed_autoparallel.predict.training_log import read_log

    told, failed = [], []
    for path in arguments.from_log:
        try:
            log = read_log(path)
            found = observation_of(log, device, arguments.nproc_per_node, arguments.network_gbit_per_s)
            told.append((log, found))
        except ConfigError as error:
            failed.append(str(error))
    if not told:
        raise ConfigError(f"none of {len(failed)} logs could be used. {' '.join(failed)}")
    return told, failed


def _document(
    device: Device, result: Calibration, taken: list[Observation], told: list[tuple[TrainingLog, Observation]]
) -> dict[str, object]:
    from mindspeed_autoparallel.predict.calibration import peak_errors

    before, after = device.efficiency(result.stack), result.device.efficiency(result.stack)
    return {
        "schema_version": 1,
        "device": device.name,
        "stack": result.stack,
        "observations": [
            {
                "source": item.source,
                "step_ms": item.step_ms,
                "error_before": result.before[index],
                "error_after": result.after[index],
                "error_left_out": result.left_out[index] if result.left_out else None,
            }
            for index, item in enumerate(taken)
        ],
        "kept_share": result.share,
        "kept": result.kept,
        "remarks": {log.name: list(log.remarks) for log, _ in told if log.remarks},
        "peaks_gib": {log.name: peak_errors(log, item.work, device) for log, item in told if log.peak_gib},
        "figures": {
            name: {"before": getattr(before, name), "after": getattr(after, name), "relative_deviation": deviation}
            for name, deviation in result.deviations.items()
        },
    }


def _lines(document: dict[str, Any], num_known: int) -> list[str]:
    lines = [f"{document['device']} ({document['stack']}): {len(document['observations'])} logs"
             + (f", {num_known} of them from earlier calibrations" if num_known else "")]  # fmt: skip
    for item in document["observations"]:
        other = item["error_left_out"]
        lines.append(
            f"  {item['source']}: step {item['step_ms']:.1f} ms, prediction was {item['error_before']:+.1%} off, is "
            f"{item['error_after']:+.1%}" + ("" if other is None else f" ({other:+.1%} from the other logs alone)")
        )
    lines.append(f"  kept: {document['kept']}")
    for name, remarks in document["remarks"].items():
        lines += [f"  {name}: {remark}" for remark in remarks]
    for name, peaks in document["peaks_gib"].items():
        worst = max(peaks.values(), key=lambda pair: abs(pair[0] / pair[1] - 1))
        lines.append(f"  {name}: peaks of {len(peaks)} ranks, worst predicted {worst[0]:.1f} for {worst[1]:.1f} GiB")
    for name, figure in document["figures"].items():
        lines.append(
            f"  {name:20s} {figure['before']:10.4g} -> {figure['after']:10.4g}  +- {figure['relative_deviation']:.0%}"
        )
    lines += [f"not used: {reason}" for reason in document["not_used"]]
    if document["output"]:
        lines.append(f"written to {document['output']}; use it with --device-file")
    else:
        lines.append("nothing was written: give --output DEVICE.json")
    return lines
