"""Kill real work at random moments: nothing is orphaned, no file is half, and the same command ends as if undisturbed.

  python tests/robustness/kills.py --count 10 --seed 1                     conversions, as CI runs it
  python tests/robustness/kills.py --count 4 --jobs searches trainings     what takes minutes a kill
  python tests/robustness/kills.py --count 1 --jobs tunings --state DIR    and again with another seed, in slices
  python tests/robustness/kills.py --long                                  100 kills of all

Every kill starts a job of ``kill_jobs.py``, waits for a random share of the time that an undisturbed run takes, and
sends SIGTERM, SIGINT, SIGHUP or SIGKILL to a random process of it. Then it looks for processes that are left, starts
the same command again, and compares what that gives with the undisturbed run. Commands of the package run in processes
that are forked from one that has loaded torch, all others as a user starts them.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from kill_jobs import CLI, ROOT, Job, conversions, searches, trainings, tunings

LONG = 100
KINDS = {"conversions": conversions, "searches": searches, "tunings": tunings, "trainings": trainings}
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
GONE_S, _LONGEST_S = 60.0, 900.0
MARK = "ROBUSTNESS_KILL"
"""In the environment of a job and of all its children, so that none of them hides."""


class Forked:
    """A command of the package in a process of its own that need not load torch again."""

    def __init__(self, argv: tuple[str, ...], folder: Path) -> None:
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid == 0:
            code = 97
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.chdir(folder)
                output = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                from mindspeed_autoparallel.cli.main import main

                code = main(list(argv))
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            finally:
                os._exit(code)

    def wait(self, timeout: float) -> int:
        """Return the exit code, as ``subprocess.Popen.wait`` does."""
        deadline = time.monotonic() + timeout
        while self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            else:
                time.sleep(0.005)
        return self._code


def start(
    job: Job, folder: Path, mark: str, *more: str, environment: Mapping[str, str] | None = None
) -> Forked | subprocess.Popen[bytes]:
    """Start ``job`` in ``folder``; what it prints is added to the file ``printed`` there."""
    if job.argv[: len(CLI)] == CLI:
        return Forked((*job.argv[len(CLI) :], *more), folder)
    own = {MARK: mark, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    with (folder / "printed").open("ab") as stream:
        return subprocess.Popen(
            [*job.argv, *more],
            cwd=folder,
            env={**os.environ, **own, **(environment or {})},
            stdout=stream,
            stderr=stream,
        )


def kill_once(job: Job, seconds: float, wanted: str, source: random.Random, folder: Path) -> str:
    """Kill ``job`` once in ``folder``; what was wrong afterwards, or nothing."""
    mark = f"{os.getpid()}-{source.random()}"
    had_target = (folder / "out").exists()
    process = start(job, folder, mark)
    time.sleep(source.random() * seconds)
    victims = [one for one in processes(mark, process.pid) if job.victim in command(one)]
    if victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(source.choice(victims), source.choice(_SIGNALS))
    try:
        process.wait(GONE_S)
    except subprocess.TimeoutExpired:
        return "hang"
    deadline = time.monotonic() + GONE_S
    while left := processes(mark, process.pid):
        if time.monotonic() > deadline:
            return f"orphans {left}"
        time.sleep(0.01)
    if job.at_once and had_target and not (folder / "out").is_dir():
        return "the old target is gone"
    if job.at_once and (folder / "out").is_dir() and not had_target and job.result(folder) != wanted:
        return "half a target under its own name"
    finished = job.finished(folder)
    code = start(job, folder, mark, *job.again).wait(_LONGEST_S)
    if code:
        return f"the same command ends with {code}"
    if job.result(folder) != wanted:
        return f"another result: {job.result(folder)[:80]} instead of {wanted[:80]}"
    after = job.finished(folder)
    if lost := [name for name, content in finished.items() if after.get(name) != content]:
        return f"finished measurements lost: {lost}"
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".out.")]
    return f"left over: {hidden}" if hidden else ""


def processes(mark: str, session: int) -> list[int]:
    """Return the processes of the job with ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            ours = f"\0{MARK}={mark}".encode() in b"\0" + environment or int(its_session) == session
            if ours and state != "Z":
                found.append(int(entry.name))
    return found


def command(pid: int) -> str:
    """Return the command line of ``pid``, empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def undisturbed(job: Job, state: Path, environment: Mapping[str, str] | None = None) -> tuple[Path, float, str]:
    """Return a folder ready for ``job``, how long that took in a copy of it, and what it gave; kept in ``state``."""
    place = state / job.name.replace(" ", "-")
    good, folder, known = place / "good", place / "undisturbed", place / "known.json"
    if not known.exists():
        shutil.rmtree(place, ignore_errors=True)
        good.mkdir(parents=True)
        job.prepare(good)
        shutil.copytree(good, folder)
        begin = time.monotonic()
        if start(job, folder, f"{os.getpid()}-undisturbed", environment=environment).wait(_LONGEST_S):
            raise SystemExit(f"{job.name} fails undisturbed: {(folder / 'printed').read_text()[-3000:]}")
        known.write_text(json.dumps([time.monotonic() - begin, job.result(folder)]))
        shutil.rmtree(folder)
    seconds, wanted = json.loads(known.read_text())
    return good, seconds, wanted


def _end_all() -> None:
    """Kill what jobs of this process still run: it was ended itself."""
    for pid in processes(f"{os.getpid()}-", -1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Run the suite and print what came of it; 1 where anything was wrong after a kill."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", nargs="+", choices=KINDS, default=["conversions"])
    parser.add_argument("--long", action="store_true", help=f"{LONG} kills of all jobs")
    parser.add_argument("--state", type=Path, help="folder for the undisturbed runs, which then are made once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so many seconds")
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    count = LONG if arguments.long else arguments.count
    known = [job for kind in (KINDS if arguments.long else arguments.jobs) for job in KINDS[kind]()]
    import safetensors.torch  # noqa: F401  what a forked command would load
    import torch  # noqa: F401

    wrong, killed = Counter[str](), Counter[str]()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    atexit.register(_end_all)
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            if time.monotonic() - begin > arguments.seconds:
                break
            job = known[number % len(known)]
            folder = Path(name) / str(number)
            good, seconds, wanted = undisturbed(job, arguments.state or Path(name))
            shutil.copytree(good, folder)
            problem = kill_once(job, seconds, wanted, source, folder)
            killed[job.name] += 1
            print(f"{arguments.seed}:{number} {job.name}: {problem or 'resumed'}", flush=True)
            if problem:
                wrong[problem.partition(":")[0]] += 1
                print((folder / "printed").read_text(errors="replace")[-1500:])
            shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{killed.total()} kills of {dict(killed)} in {time.monotonic() - begin:.0f} s; wrong: {dict(wrong) or 'nothing'}"
    )
    print(f"{killed.total() - wrong.total()} resumed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
