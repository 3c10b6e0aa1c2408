"""Diagnose this node and a launch script, and print what to set and why; changes nothing.

doctor                                   this node
doctor --script train.sh                 this node and the script's settings on it
doctor --script train.sh --format export the lines to put into the script
doctor --script config.yaml              only a configuration of MindSpeed-MM's native FSDP2 trainer

Exits with 1 if it finds something that will fail, otherwise with 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_autoparallel.patching.patch import Patch


_NO_SCRIPTS = (".json", ".py", ".toml", ".ini")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--script", type=Path, help="a shell launch script, or a YAML of MindSpeed-MM's native trainer; read, not run")
    add("--peers", default="", help="other nodes, comma separated, whose clocks to compare through ssh")
    add("--format", choices=("text", "json", "export"), default="text", help="export: lines to put into the script")
    add("--json", action="store_true", help="the same as --format json")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.hosts.script import read_script
    from mindspeed_autoparallel.runtime.doctor.examine import examine
    from mindspeed_autoparallel.runtime.doctor.finding import PROBLEM, as_json, as_text, export_lines
    from mindspeed_autoparallel.runtime.doctor.native import check_native_file
    from mindspeed_autoparallel.runtime.doctor.node import this_node

    suffix = arguments.script.suffix if arguments.script else ""
    if suffix in _NO_SCRIPTS:
        raise ConfigError(
            f"{arguments.script} is not a launch script: --script takes a shell script, or a YAML of an FSDP2 trainer. "
            "Give the script that starts the training."
        )
    configuration = arguments.script if suffix in (".yaml", ".yml") else None
    script = read_script(arguments.script) if arguments.script and configuration is None else None
    peers = [peer for peer in arguments.peers.split(",") if peer]
    findings = check_native_file(configuration) if configuration else examine(this_node(script, peers), _patches())
    if arguments.json or arguments.format == "json":
        print(json.dumps(as_json(findings), indent=2))
    elif arguments.format == "export":
        print("\n".join(export_lines(findings)))
    else:
        print(as_text(findings))
    return 1 if any(finding.status == PROBLEM for finding in findings) else 0


def _patches() -> list[Patch]:
    """Return every patch of this package, imported by name: commands are not layered above the patches package."""
    return list(importlib.import_module("mindspeed_autoparallel.patches").patch_table())
