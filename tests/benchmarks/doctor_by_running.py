"""Check the doctor's verdicts on launch scripts by running the scripts, with stand-ins for every program they start.

    python tests/benchmarks/doctor_by_running.py FOLDER_OR_SCRIPT...

Each script runs under bash in a folder of its own and namespaces of its own (``unshare``), with a ``PATH`` of stand-ins:
``torchrun``, ``python``, ``msrun`` and ``deepspeed`` write down their words and end, everything else does nothing. From
those words, and Megatron's rules alone, comes what the doctor should say; nothing of the doctor's reader is used for it.
Prints how many scripts agree, and every one that does not.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mindspeed_autoparallel.hosts.script import read_script
from mindspeed_autoparallel.runtime.doctor.launch import check_model_sizes, check_world_size
from mindspeed_autoparallel.runtime.doctor.node import Node

LAUNCHERS = ("torchrun", "python", "python3", "msrun", "deepspeed")
QUIET = (
    "mkdir",
    "tee",
    "sleep",
    "source_env",
    "npu-smi",
    "nvidia-smi",
    "rm",
    "cp",
    "sudo",
    "pip",
    "ray",
    "hostname",
    "ps",
)
PLACEHOLDER = re.compile(r"<(?![<(&])[^<>\n]*[^<>\n=]>")
REAL = (
    "dirname",
    "basename",
    "date",
    "wc",
    "cat",
    "head",
    "tail",
    "tr",
    "cut",
    "sed",
    "grep",
    "awk",
    "seq",
    "realpath",
    "readlink",
)
RECORD = """#!/bin/bash
{ printf '%s\\0' "$(basename "$0")" "$@"; printf '\\1'; } >> "$DOCTOR_RECORD"
"""
OWN_SPLITS = ("pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "hybrid-layer-pattern",
    "num-layer-list", "noop-layers", "heterogeneous-layers-config-path")  # fmt: skip


def stand_ins(folder: Path) -> Path:
    """Write the stand-ins into ``folder`` and return it."""
    folder.mkdir()
    for name in (*LAUNCHERS, *QUIET):
        (folder / name).write_text(RECORD if name in LAUNCHERS else "#!/bin/bash\ncat >/dev/null 2>&1 </dev/null\n")
        (folder / name).chmod(0o755)
    for name in REAL:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


def launches(script: Path, programs: Path, folder: Path) -> list[list[str]]:
    """Run ``script`` and return the words of every program it starts; ``<your folder>`` in it becomes a word."""
    text = script.read_text(encoding="utf-8", errors="replace")
    filled = PLACEHOLDER.sub("placeholder", text)
    if filled != text:
        script = folder / script.name
        script.write_text(filled)
    record = folder / "record"
    record.write_bytes(b"")
    environment = {"PATH": str(programs), "HOME": str(folder), "DOCTOR_RECORD": str(record)}
    unshare = shutil.which("unshare") or "unshare"
    command = [unshare, "-rnpmf", "--kill-child", "/bin/bash", str(script)]
    try:
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=10,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return []
    found = [call.split(b"\0")[:-1] for call in record.read_bytes().split(b"\1") if call]
    return [[word.decode(errors="replace") for word in words] for words in found]


def flags_of(words: list[str]) -> dict[str, str]:
    """Return ``--name value`` and ``--name=value`` of a command; the last of several counts, as in argparse."""
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if equals else "" if after.startswith("--") else after
    return found


def expected(words: list[str]) -> str:
    """Return ``fits TP PP CP DP``, or the first of Megatron's rules that the command breaks; nothing without sizes."""
    flags = flags_of(words)
    sizes = [f"{name}-model-parallel-size" for name in ("tensor", "pipeline")] + ["context-parallel-size"]
    if not any(size in flags for size in sizes):
        return ""

    def count(name: str, default: int = 1) -> int:
        return int(flags[name]) if flags.get(name, "").isdigit() else default

    tensor, pipeline, context = (count(size) for size in sizes)
    world = count("worker-num", 0) or count("nnodes") * count("nproc-per-node", 0)
    if not world:
        return "no processes"
    broken = []
    if world % (tensor * pipeline * context):
        return "broken world"
    model = tensor * pipeline * context
    data = world // model
    if "micro-batch-size" in flags and count("global-batch-size", 0) % (data * count("micro-batch-size")):
        return "broken batch"
    if "mm-model" not in flags:
        if count("num-attention-heads", tensor) % tensor or count("ffn-hidden-size", tensor) % tensor:
            broken.append("tensor")
        if count("num-experts", 0) % count("expert-model-parallel-size"):
            broken.append("experts")
        if not any(own in flags for own in OWN_SPLITS) and count("num-layers", pipeline) % pipeline:
            broken.append("layers")
    if broken:
        return f"broken {broken[0]}"
    return f"fits TP {tensor} x PP {pipeline} x CP {context} = {model} on {world} processes, DP {data}"


def told(script: Path) -> tuple[str, str]:
    """Return the doctor's worst word on the sizes of ``script``, and what it says."""
    node = Node(script=read_script(script))
    findings = [*check_world_size(node), *check_model_sizes(node)]
    for status in ("problem", "unknown", "ok"):
        for finding in findings:
            if finding.status == status:
                return status, finding.what
    return "", ""


def scripts(places: list[str]) -> list[Path]:
    """Return the files among ``places``, and the shell scripts in the folders among them."""
    return sorted(path for place in map(Path, places) for path in (place.rglob("*.sh") if place.is_dir() else [place]))


def main() -> None:
    """Compare, print what differs, and the counts."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        programs = stand_ins(Path(place) / "programs")
        for script in scripts(sys.argv[1:]):
            status, what = told(script)
            if not status:
                counts["no sizes"] += 1
                continue
            work = Path(tempfile.mkdtemp(dir=place))
            calls = launches(script, programs, work)
            words = max(reversed(calls), key=lambda call: sum(word.startswith("--") for word in call), default=[])
            want = expected(words) if words else "nothing started"
            shutil.rmtree(work, ignore_errors=True)
            agrees = {"ok": want == f"fits {what}", "problem": want.startswith("broken"), "unknown": True}[status]
            if want in ("nothing started", "", "no processes"):
                verdict = f"{status}: not started here" if status != "unknown" else "unknown"
            else:
                verdict = f"{status}: {'agrees' if agrees else 'DIFFERS'}" if status != "unknown" else "unknown"
            counts[verdict] += 1
            if not verdict.endswith("agrees") and status != "unknown":
                print(f"{script}: doctor {status} '{what}', run: {want}")
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
