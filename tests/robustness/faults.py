"""Faults inside real searches, tuning runs and trainings: the cause is named, nothing is lost, the rerun gives the same.

  python tests/robustness/faults.py --count 7 --seed 1 --jobs searches
  python tests/robustness/faults.py --long                                 40 each of searches, tunings and trainings

A rank exits, raises, runs out of the machine's memory, aborts, is killed, stops for 30 s, or finds the disk full
(``fault_site/sitecustomize.py``). The rank is drawn from those of an undisturbed run, the moment from the processor
seconds that it used there, so load moves nothing; every second fault of a training comes after a checkpoint. Jobs are
those of ``kills.py``, with made-up secrets of thirty kinds on their command lines and in their environment: no file
of theirs may hold one. A full disk needs the right to mount a tmpfs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import kills
from kill_jobs import STEPS, Job

sys.path.insert(0, str(kills.ROOT / "tests" / "helpers"))
from forked_python import forked_python, server_seconds
from secret_kinds import KINDS as SECRETS

from mindspeed_autoparallel.redaction import with_encoded

LONG = 40
NAMED = {
    # What the output has to hold beside the fault's own mark: words a user can act on.
    "kill": r"signal 9|Signal 9|Killed|SIGKILL|-9\b",
    "disk": r"No space left on device|free space",
    "exit": r"exit code 3|exitcode *: 3",
    "raise": r"ValueError: the fault that was put here",
    "memory": r"memory of this machine ran out|MemoryError|out of memory",
    "abort": r"signal 6|Signal 6|Aborted|SIGABRT|-6\b",
    "stop": r"",
}
BY_FORM = ",".join(secret for flag, secret in SECRETS.values() if flag == "--note")
BY_NAME = {f"OBS_{flag[2:]}".replace("-", "_").upper(): secret for flag, secret in SECRETS.values() if flag != "--note"}
_WRITERS = "-c from multiprocessing."
"""Megatron keeps the queue of a checkpoint's writers in a process of Python's own, which outlives a killed rank."""
SITE = Path(__file__).parent / "fault_site"
DISK_MIB = 64
MOST_TRIES = 4
NAMED_S, STOPPED_S, LONGEST_S = 30.0, 30.0, 900.0


@dataclass(frozen=True)
class Fault:
    """What happens to which of a run's ranks, counted in the order of their starts, and when."""

    kind: str
    rank: int
    seconds: float
    """Processor seconds of that rank."""
    step: int
    """Not before the checkpoint of this step is whole; 0 for any time."""

    def __str__(self) -> str:
        after = f", after checkpoint {self.step}" if self.step else ""
        return f"{self.kind} of rank process {self.rank} at {self.seconds:.2f} s{after}"


def drawn(kind: str, lives: list[tuple[float | None, float]], steps: bool, source: random.Random) -> Fault:
    """Draw a fault from ``lives``, (processor seconds at the start of the process group, and at the end) of each rank.

    Three of four come once the rank has joined: before that it imports libraries. ``steps``: after a checkpoint.
    """
    rank = source.randrange(len(lives))
    joined, ended = lives[rank]
    if steps:
        return Fault(kind, rank, 0.0, source.randrange(1, STEPS))
    early = joined is None or source.random() < 0.25
    seconds = source.uniform(0.0, joined or ended) if early else source.uniform(joined or 0.0, ended)
    return Fault(kind, rank, seconds, 0)


def fault_once(job: Job, fault: Fault, good: Path, wanted: str, folder: Path) -> str:
    """Run ``job`` with one fault and again without; what was wrong, or nothing, or ``no fault``."""
    for _ in range(MOST_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        disk = folder / ("ck" if fault.step or job.name == "hetero training" else "work")
        try:
            if fault.kind == "disk" and not _mounted(disk):
                return "no fault: a tmpfs cannot be mounted"
            problem = _with_fault(job, fault, folder)
            if (folder / "faults" / "happened").exists():
                (disk / "filler").unlink(missing_ok=True)
                return problem or _told(job, folder) or _again(job, wanted, folder) or _told(job, folder)
            if problem:
                return problem
        finally:
            if fault.kind == "disk":
                subprocess.run(["umount", "-l", disk], check=False, stderr=subprocess.DEVNULL)
        fault = replace(fault, seconds=fault.seconds / 2)
    return "no fault: the rank did not live so long"


def _mounted(disk: Path) -> bool:
    disk.mkdir(exist_ok=True, mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "tmpfs", str(disk)]
    return subprocess.run(mount, check=False).returncode == 0


def _environment(folder: Path, fault: Fault | None) -> dict[str, str]:
    (folder / "faults").mkdir()
    own = {"FAULT_FOLDER": str(folder / "faults"), "PYTHONPATH": f"{SITE}:{kills.ROOT}"}
    words = () if fault is None else (fault.kind, fault.rank, fault.seconds, fault.step)
    own |= BY_NAME
    return {**own, "FAULT": ":".join(map(str, words))} if words else own


def _with_fault(job: Job, fault: Fault, folder: Path) -> str:
    """Run ``job`` until it ends; what was wrong with how it ended."""
    happened_at = folder / "faults" / "happened"
    process = kills.start(job, folder, str(folder), environment=_environment(folder, fault))
    happened, begin = None, time.monotonic()
    while True:
        try:
            ended = process.wait(0.2)
            break
        except subprocess.TimeoutExpired:
            if happened is None and happened_at.exists():
                happened = time.monotonic()
            if time.monotonic() - begin > LONGEST_S:
                return "hang"
    if not happened_at.exists():
        return "" if ended == 0 else f"ends with {ended} without a fault"
    # Data-loader workers of a rank that is gone look for it every 5 s, by torch's own watch.
    deadline = time.monotonic() + kills.GONE_S
    while left := _left(folder):
        if time.monotonic() > deadline:
            return f"orphans {[(pid, kills.command(pid)[:80]) for pid in left]}"
        time.sleep(0.5)
    printed = (folder / "printed").read_text(errors="replace")
    took = time.monotonic() - (happened or time.monotonic())
    print(f"    ends with {ended} after {took:.0f} s", flush=True)
    if ended != 0 and not re.search(NAMED[fault.kind], printed):
        return f"ends with {ended} and does not name the cause"
    if ended != 0 and took > NAMED_S + STOPPED_S * (fault.kind == "stop"):
        return f"named after {took:.0f} s"
    return ""


def _left(folder: Path) -> list[int]:
    """Return the processes in sessions of the run's ranks, without Megatron's writers of checkpoints."""
    ranks = [json.loads(place.read_text() or "[0]")[0] for place in (folder / "faults").glob("rank-*")]
    mark = str(folder)
    found = {pid for rank in ranks for pid in kills.processes(mark, rank) if kills.command(pid)}
    return sorted(pid for pid in found if _WRITERS not in kills.command(pid))


def _told(job: Job, folder: Path) -> str:
    """Return which secrets of the command line and the environment a file of the run holds; what a training prints is
    its script's own."""
    values = with_encoded({secret for _, secret in SECRETS.values()})
    for path in folder.rglob("*"):
        if path.is_file() and not (path.name == "printed" and job.name == "hetero training") and "ck" not in path.parts:
            text = path.read_bytes().decode(errors="replace")
            if found := [value for value in values if value in text]:
                return f"secrets in a file: {path.relative_to(folder)} holds {found[:3]}"
    return ""


def _again(job: Job, wanted: str, folder: Path) -> str:
    """Start the same command without a fault: it keeps what was finished, and gives what an undisturbed run gives."""
    finished = job.finished(folder)
    if code := kills.start(job, folder, f"{folder}-again", *job.again).wait(LONGEST_S):
        return f"the same command ends with {code}"
    if job.result(folder) != wanted:
        return f"another result: {job.result(folder)[:80]} instead of {wanted[:80]}"
    after = job.finished(folder)
    lost = [name for name, content in finished.items() if after.get(name) != content]
    return f"finished work lost: {lost}" if lost else ""


def undisturbed(job: Job, state: Path) -> tuple[Path, str, list[tuple[float | None, float]]]:
    """Return a folder ready for ``job``, what it gives, and the lives of its ranks; kept in ``state``."""
    lives = state / job.name.replace(" ", "-") / "faults"
    if not lives.is_dir():
        lives.parent.mkdir(parents=True, exist_ok=True)
        (lives.parent / "known.json").unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as name:
            own = _environment(Path(name), None)
            good, _, wanted = kills.undisturbed(job, state, own)
            shutil.copytree(Path(name) / "faults", lives)
    good, _, wanted = kills.undisturbed(job, state)
    ranks = sorted(lives.glob("rank-*"), key=lambda place: int(place.name.rpartition("-")[2]))
    return good, wanted, [(joined, used) for _, joined, used in (json.loads(place.read_text()) for place in ranks)]


def _jobs(names: list[str]) -> list[Job]:
    """Return the jobs of ``names`` with programs that are forked from one with torch: half of a run loads torch."""
    python = forked_python()
    jobs = [job for name in names for job in kills.KINDS[name]()]
    # A forked program has the server for its parent: data-loader workers, which look for theirs, would never end.
    own = {"hetero training": ("--num-workers", "0")}
    return [
        replace(
            job,
            argv=(
                *(python if word == sys.executable else word for word in job.argv),
                *("--wandb-exp-name", BY_FORM),
                *own.get(job.name, ()),
            ),
        )
        for job in jobs
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=len(NAMED), help="faults in all")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them, to go on after a slice")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", nargs="+", choices=sorted(kills.KINDS), default=["searches"])
    parser.add_argument("--long", action="store_true", help=f"{LONG} faults of each kind of job")
    parser.add_argument("--state", type=Path, help="folder for the undisturbed runs, which then are made once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after so many seconds")
    return parser.parse_args()


def main() -> int:
    """Run the suite; 1 where anything was wrong."""
    arguments = _arguments()
    jobs = _jobs(["searches", "tunings", "trainings"] if arguments.long else arguments.jobs)
    count = LONG * len(jobs) if arguments.long else arguments.count
    wrong, happened, begin = Counter[str](), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for number in range(arguments.first, arguments.first + count):
            if time.monotonic() - begin > arguments.seconds:
                break
            job, turn = jobs[number % len(jobs)], number // len(jobs)
            good, wanted, lives = undisturbed(job, arguments.state or Path(name))
            source = random.Random(f"{arguments.seed}:{number}")
            steps = job.name == "hetero training" and turn % 2 == 0
            fault = drawn(list(NAMED)[turn % len(NAMED)], lives, steps, source)
            folder, used = Path(name) / str(number), server_seconds()
            problem = fault_once(job, fault, good, wanted, folder)
            print(
                f"{arguments.seed}:{number} {job.name}, {fault}: {problem or 'named, and the rerun is whole'}, "
                f"{server_seconds() - used:.0f} processor s",
                flush=True,
            )
            if not problem.startswith("no fault"):
                happened[fault.kind] += 1
                if problem:
                    wrong[problem.partition(":")[0]] += 1
                    print((folder / "printed").read_text(errors="replace")[-3000:])
            for pid in kills.processes(str(folder), -1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{happened.total()} faults, {dict(happened)}; wrong: {dict(wrong) or 'nothing'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
