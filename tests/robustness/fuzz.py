"""Hand changed files to every command: each run is an answer or one line, and touches nothing but its output folder.

  python tests/robustness/fuzz.py --count 300 --seed 1     a part with a fixed seed, as CI runs it
  python tests/robustness/fuzz.py --long                   20,000 mutations
  python tests/robustness/fuzz.py --case 1:4711            one of them again, with what it printed

Every case is a process of its own (forked from one that has loaded everything) with at most 1 GiB more memory than that
one and 10 s of CPU; an audit hook ends it where it opens a file for writing elsewhere or starts a program. Pickles,
YAML and texts carry a canary that leaves a file when it is run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mutations
from targets import Target, make_seeds, targets

LONG = 20_000
MEMORY_BYTES, CPU_S, WALL_S, MOST_CHARACTERS = 2**30, 10, 60, 500
_TRACEBACK, _WROTE, _RAN = 97, 98, 99
_MISPLACED = 0.04
"""Share of cases in which something else stands in the file's place."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended: ``problem`` is empty where it ended as it should."""

    target: str
    seed: str
    code: int
    problem: str
    text: str


def run(seed: int, count: int, folder: Path) -> Iterator[Outcome]:
    """Run ``count`` cases of ``seed``, the targets in turn."""
    make_seeds(folder / "seeds")
    _load(folder)
    known = targets()
    for number in range(count):
        yield run_case(known[number % len(known)], seed, number, folder)


def run_case(target: Target, seed: int, number: int, folder: Path) -> Outcome:
    """Run case ``number`` of ``seed`` in a fresh copy of its good files."""
    source = random.Random(f"{seed}:{number}")
    work = folder / "case"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "seeds" / target.seeds, work)
    file = next(work.glob(target.file))
    if source.random() < _MISPLACED:
        mutations.misplace(file, source)
    else:
        file.write_bytes(target.mutation(file.read_bytes(), source))
    printed = folder / "printed"
    code, problem = _watched(target, work, printed)
    text = printed.read_text(encoding="utf-8", errors="replace")
    if (work / mutations.CANARY).exists():
        problem = "code run"
    return Outcome(target.name, f"{seed}:{number}", code, problem or _improper(code, text), text)


def _improper(code: int, text: str) -> str:
    """What is wrong with an ending that was neither a crash nor a hang."""
    if code == _TRACEBACK:
        return "traceback"
    if code in (_WROTE, _RAN):
        return "write outside" if code == _WROTE else "program run"
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    errors = [line for line in text.splitlines() if "Error: " in line[:40] or "InfeasiblePlan: " in line[:40]]
    if code in (2, 3) and any(len(line) > MOST_CHARACTERS for line in errors):
        return f"an error of {max(map(len, errors))} characters"
    return ""


def _watched(target: Target, work: Path, printed: Path) -> tuple[int, str]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become(target, work, printed)
    deadline = time.monotonic() + WALL_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1, "hang"
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return -number, "hang" if number in (signal.SIGXCPU, signal.SIGKILL) else f"signal {number}"
    return os.WEXITSTATUS(status), ""


def _become(target: Target, work: Path, printed: Path) -> None:
    """Run the command in this process, which never returns from here."""
    code = _TRACEBACK
    try:
        os.setsid()
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(work)
        grown = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (grown + MEMORY_BYTES, grown + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _guard(work, target.argv[0] == "doctor")
        code = _call(target)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _call(target: Target) -> int:
    from mindspeed_autoparallel.cli.main import main, one_line
    from mindspeed_autoparallel.errors import AutoParallelError

    if not target.argv[0].startswith("call:"):
        return main(list(target.argv))
    module, _, name = target.argv[0].removeprefix("call:").partition(":")
    try:
        getattr(importlib.import_module(module), name)(Path(target.argv[1]))
    except AutoParallelError as error:
        print(one_line(error), file=sys.stderr)
        return error.exit_code
    return 0


def _guard(work: Path, asks_the_node: bool) -> None:
    """End this process where it writes outside ``work`` or starts a program that is not ours.

    ``asks_the_node``: the doctor runs the node's own tools; a program of the file's is told by the canary.
    """
    allowed = (str(work.resolve()), os.devnull, tempfile.gettempdir() + "/torch", "/dev/shm")

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and isinstance(path, (str, bytes)):
                place = os.path.realpath(os.fsdecode(path))
                if not place.startswith(allowed) and "__pycache__" not in place:
                    os.write(2, f"wrote {place}\n".encode())
                    os._exit(_WROTE)
        elif event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn"):
            command = arguments[1] if event == "subprocess.Popen" else arguments
            own = isinstance(command, (list, tuple)) and list(command[:3]) in (
                [sys.executable, "-m", "mindspeed_autoparallel.planner.workers"],
                [sys.executable, "-m", "mindspeed_autoparallel.planner.layouts.workers"],
            )
            if not own and not asks_the_node:
                os.write(2, f"ran {command!r}\n".encode())
                os._exit(_RAN)

    sys.addaudithook(hook)


def _load(folder: Path) -> None:
    """Load here what every command loads, so that a case costs milliseconds; every good file must end with 0."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for target in targets():
        for name in _modules_of(target, folder):
            with contextlib.suppress(ImportError):  # some modules of extensions are no modules by that name
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _modules_of(target: Target, folder: Path) -> list[str]:
    """Run ``target`` with its good files in a fork; what it loaded that is not loaded here."""
    work, told = folder / "case", folder / "modules"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "seeds" / target.seeds, work)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        loaded, code = set(sys.modules), _TRACEBACK
        with contextlib.suppress(BaseException):
            os.chdir(work)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            code = _call(target)
            told.write_text("\n".join(set(sys.modules) - loaded))
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{target.name}: its good files end with {os.waitstatus_to_exitcode(status)}")
    return told.read_text().splitlines()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", action="store_true", help=f"{LONG} mutations")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    parser.add_argument("--case", metavar="SEED:NUMBER")
    parser.add_argument("--keep", type=Path, help="write every problem here, one JSON line each")
    return parser.parse_args()


def main() -> int:
    """Run the suite and print what came of it; 1 where a case ended as none should."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "seeds").mkdir()
        if arguments.case:
            seed, _, number = arguments.case.partition(":")
            make_seeds(folder / "seeds")
            _load(folder)
            known = targets()
            print(run_case(known[int(number) % len(known)], int(seed), int(number), folder))
            return 0
        problems, codes = Counter(), Counter()
        count = LONG if arguments.long else arguments.count
        begin = time.monotonic()
        for outcome in run(arguments.seed, count, folder):
            codes[outcome.code] += 1
            if outcome.problem:
                problems[outcome.problem.split(" of ")[0]] += 1
                last = (outcome.text.strip().splitlines() or [""])[-1][:200]
                print(f"{outcome.seed} {outcome.target}: {outcome.problem}: {last}", flush=True)
                if arguments.keep:
                    with arguments.keep.open("a") as stream:
                        stream.write(json.dumps(vars(outcome)) + "\n")
            if time.monotonic() - begin > arguments.seconds:
                break
        seconds = time.monotonic() - begin
        print(
            f"{codes.total()} mutations in {seconds:.0f} s; exit codes {dict(codes)}; problems {dict(problems) or 'none'}"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
