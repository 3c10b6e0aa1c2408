"""Kill real work at random moments: nothing is orphaned, no file is half, and the same command ends as if undisturbed.

  python tests/robustness/kills.py --count 10 --seed 1     a part with a fixed seed, as CI runs it
  python tests/robustness/kills.py --long                  100 kills

Every kill starts one of the jobs below, waits for a random share of the time that an undisturbed run takes, and sends
SIGTERM, SIGINT, SIGHUP or SIGKILL to a random process of it. Then it looks for processes that are left, starts the same
command again, and compares what that gives with the undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LONG = 100
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
_GONE_S = 60.0
MARK = "ROBUSTNESS_KILL"
"""In the environment of a job and of all its children, so that none of them hides."""
_CLI = (sys.executable, "-m", "mindspeed_autoparallel")


@dataclass(frozen=True)
class Job:
    """A command in a folder, and the digest of what it gives."""

    name: str
    argv: tuple[str, ...]
    prepare: Callable[[Path], None]
    result: Callable[[Path], str]


def jobs() -> list[Job]:
    """Conversions: into a layout, back, into another layout, and over an existing target."""
    back = ("--hf-dir", "hf")
    layers = ("--llm-pp-layers", "3,5", "--tp-size", "2")
    return [
        Job("hf-to-mm", (*_CLI, "convert", "hf-to-mm", "hf", "out", *layers), _model, _weights),
        Job(
            "hf-to-mm over an old one",
            (*_CLI, "convert", "hf-to-mm", "hf", "out", *layers, "--overwrite"),
            _old,
            _weights,
        ),
        Job("mm-to-hf", (*_CLI, "convert", "mm-to-hf", "ck", "out", *back), _checkpoint, _weights),
        Job(
            "resplit", (*_CLI, "convert", "resplit", "ck", "out", *back, "--llm-pp-layers", "8"), _checkpoint, _weights
        ),
        Job("torch_dist", (*_CLI, "convert", "hf-to-mm", "hf", "out", "--format", "torch_dist"), _model, _weights),
    ]


def kill_once(job: Job, seconds: float, wanted: str, source: random.Random, folder: Path) -> str:
    """Kill ``job`` once in ``folder``; what was wrong afterwards, or nothing."""
    mark = f"{os.getpid()}-{source.random()}"
    had_target = (folder / "out").exists()
    process = _start(job, folder, mark)
    time.sleep(source.random() * seconds)
    victims = _processes(mark)
    if victims:
        victim = source.choice(victims)
        number = source.choice(_SIGNALS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
    try:
        process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        return "hang"
    deadline = time.monotonic() + _GONE_S
    while left := _processes(mark):
        if time.monotonic() > deadline:
            return f"orphans {left}"
        time.sleep(0.1)
    if had_target and not (folder / "out").is_dir():
        return "the old target is gone"
    if (folder / "out").is_dir() and not had_target and job.result(folder) != wanted:
        return "half a target under its own name"
    again = _start(job, folder, mark, "--overwrite") if "--overwrite" not in job.argv else _start(job, folder, mark)
    if again.wait(600):
        return f"the same command ends with {again.returncode}"
    if job.result(folder) != wanted:
        return "another result"
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".out.")]
    return f"left over: {hidden}" if hidden else ""


def _start(job: Job, folder: Path, mark: str, *more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    with (folder.parent / "printed").open("wb") as stream:
        return subprocess.Popen([*job.argv, *more], cwd=folder, env=environment, stdout=stream, stderr=stream)


def _processes(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{MARK}={mark}\0".encode() in environment + b"\0" and state != "Z":
                found.append(int(entry.name))
    return found


def _model(folder: Path) -> None:
    from mindspeed_autoparallel.weights.example import write_random_model

    config = {
        "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    write_random_model(folder / "hf", config)


def _checkpoint(folder: Path) -> None:
    _model(folder)
    subprocess.run([*_CLI, "convert", "hf-to-mm", "hf", "ck", "--llm-pp-layers", "4,4"], cwd=folder, check=True)


def _old(folder: Path) -> None:
    _model(folder)
    subprocess.run([*_CLI, "convert", "hf-to-mm", "hf", "out"], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _weights(folder: Path) -> str:
    """A digest of every tensor of the target, by name; torch's files hold the time they were written."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for path in sorted((folder / "out").rglob("*")):
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        elif path.name == "model_optim_rng.pt":
            tensors = torch.load(path, weights_only=True)["model"]
        else:
            digest.update(str(path.name).encode())
            digest.update(path.read_bytes() if path.suffix in (".json", ".txt", ".distcp") else b"")
            continue
        for name in sorted(tensors):
            digest.update(f"{path.relative_to(folder)}:{name}".encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    """Run the suite and print what came of it; 1 where anything was wrong after a kill."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true", help=f"{LONG} kills")
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    count = LONG if arguments.long else arguments.count
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        undisturbed: dict[str, tuple[float, str]] = {}
        known = jobs()
        for number in range(count):
            job = known[number % len(known)]
            folder = Path(name) / str(number)
            folder.mkdir()
            job.prepare(folder)
            if job.name not in undisturbed:
                begin = time.monotonic()
                if _start(job, folder, "undisturbed").wait(600):
                    print((folder.parent / "printed").read_text())
                    return 1
                undisturbed[job.name] = time.monotonic() - begin, job.result(folder)
                folder = Path(name) / f"{number}-killed"
                folder.mkdir()
                job.prepare(folder)
            seconds, wanted = undisturbed[job.name]
            problem = kill_once(job, seconds, wanted, source, folder)
            if problem:
                wrong[problem.partition(":")[0]] += 1
                print(f"{arguments.seed}:{number} {job.name}: {problem}", flush=True)
    print(f"{count} kills; wrong: {dict(wrong) or 'nothing'}; {count - sum(wrong.values())} resumed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
