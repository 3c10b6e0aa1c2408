"""Show, export or import the operator knowledge base.

Samples of different devices or software releases never mix: both are part of the key.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("show", "export", "import"), help="show, export or import")
    add("base", type=Path, metavar="BASE.sqlite", help="knowledge base")
    add("file", type=Path, nargs="?", metavar="FILE.json", help="file to export to or import from")
    add("--json", action="store_true", help="print JSON only")


def run(arguments: argparse.Namespace) -> int:
    """Run one action; raises ``ConfigError`` for a missing file."""
    from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
    from mindspeed_autoparallel.profiles.knowledge.base import export_knowledge, import_knowledge

    if arguments.action != "show" and arguments.file is None:
        raise ConfigError(f"knowledge {arguments.action} needs FILE.json.")
    if arguments.action != "import" and not arguments.base.exists():
        raise ConfigError(f"there is no knowledge base {arguments.base}.")
    base = KnowledgeBase(arguments.base)
    if arguments.action == "export":
        result: object = {"exported": export_knowledge(base, arguments.file)}
    elif arguments.action == "import":
        result = {"imported": import_knowledge(base, arguments.file)}
    else:
        result = {
            "fingerprints": [
                {"device": device, "software": software, "samples": count}
                for device, software, count in base.fingerprints()
            ]
        }
    if arguments.json:
        print(json.dumps(result))
    elif arguments.action == "show":
        for device, software, count in base.fingerprints():
            print(f"{count:8d} samples  {device}  {software}")
    else:
        print(json.dumps(result))
    return 0
