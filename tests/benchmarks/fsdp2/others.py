"""Configuration files of FSDP2 trainers, and scripts with --use-torch-fsdp2: how many are read, and why others are not.

python tests/benchmarks/fsdp2/others.py CHECKOUT...

Decisions are read for a stand-in model with the names that a file lists, on the fewest of 8 to 1,024 devices that the
sizes allow, and written back unchanged: the file has to keep every byte.
"""

import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from native_files import modules

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.hosts.opening import open_host_file
from mindspeed_autoparallel.hosts.trainers import read_trainer_file
from mindspeed_autoparallel.profiles.sharded import ShardedModule

LAYERS_OF_MEGATRON = [
    ShardedModule(name=f"decoder.layers.{number}", kind="layer", pattern="decoder.layers.{*}", is_layer=True)
    for number in range(4)
]
DEVICES = [2**power for power in range(3, 11)]


def script_outcome(path: Path) -> tuple[str, str]:
    """Return the same of a launch script with ``--use-torch-fsdp2``; a stand-in model where its YAML lists modules."""
    if not path.is_file() or "--use-torch-fsdp2" not in path.read_text("utf-8", "replace"):
        return "", ""
    reason = ""
    for devices in DEVICES:
        try:
            opened = open_host_file(path)
            listed = opened.path.suffix != ".sh"
            stack = stand_in(read_trainer_file(opened.path)) if listed else [modules()[0], *LAYERS_OF_MEGATRON]
            opened.decisions(stack, devices, True)
        except AutoParallelError as error:
            reason = re.sub(r"\d+", "N", str(error).replace(str(path), "").strip(": "))
            continue
        return "scripts with --use-torch-fsdp2", ""
    return "scripts with --use-torch-fsdp2", reason


def outcome(path: Path) -> tuple[str, str]:
    """Return the trainer's name with nothing, or with the reason why a plan cannot describe the file."""
    try:
        file = read_trainer_file(path)
    except AutoParallelError:
        return "", ""
    for devices in DEVICES:
        try:
            opened = open_host_file(path)
            stack = stand_in(file)
            text = opened.written(opened.decisions(stack, devices, True), stack).text
        except AutoParallelError as error:
            reason = re.sub(r"\d+", "N", str(error).replace(str(path), "").strip(": "))
            continue
        kept = path.read_bytes()
        if file.trainer.older_strategy:  # verl's file of FSDP1 is written back for FSDP2
            kept = kept.replace(b"\nstrategy: fsdp\n", b"\nstrategy: fsdp2\n")
        reason = "" if text.encode() == kept else "bytes changed"
        if not reason:
            break
    return file.trainer.name, reason


def stand_in(file):
    """Return modules with the names that the file lists, four layers to a stack; a small decoder's without a list."""
    listed = file.values.texts(file.trainer.wrap) if file.trainer.wrap else ()
    found = [modules()[0]]
    for pattern in dict.fromkeys(listed):
        for number in range(4) if "{*}" in pattern else (0,):
            name = pattern.replace("{*}", str(number))
            found.append(ShardedModule(name=name, kind=pattern, pattern=pattern, is_layer="{*}" in pattern))
    return found if listed else modules()


def main() -> None:
    """Print a table for each checkout."""
    for checkout in map(Path, sys.argv[1:]):
        found: dict[str, Counter[str]] = {}
        for path in sorted([*checkout.rglob("*.yaml"), *checkout.rglob("*.yml")]):
            name, reason = outcome(path)
            found.setdefault(name, Counter())[reason] += 1
        for path in sorted(checkout.rglob("*.sh")):
            name, reason = script_outcome(path)
            found.setdefault(name, Counter())[reason] += 1
        for name, reasons in sorted(found.items()):
            if not name:
                continue
            total = sum(reasons.values())
            print(f"{checkout.name}: {name}: {reasons['']} of {total} files ({reasons[''] / total:.1%})")
            for reason, number in reasons.most_common():
                if reason:
                    print(f"    {number} x {reason[:150]}")


if __name__ == "__main__":
    main()
