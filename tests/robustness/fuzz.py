"""Hand changed files to every command: each run is an answer or one line, and touches nothing but its output folder.

  python tests/robustness/fuzz.py --count 300 --seed 1     a part with a fixed seed, as CI runs it
  python tests/robustness/fuzz.py --long                   20,000 mutations
  python tests/robustness/fuzz.py --case 1:4711            one of them again, with what it printed

A process (forked from one that has loaded everything) runs a batch of cases with at most 1 GiB more memory than that
one, and every case with 10 s of CPU; an audit hook ends it where it opens a file for writing elsewhere or starts a
program. A case that goes wrong is run again in a process of its own, and counts as it ends there. Pickles, YAML and
texts carry a canary that leaves a file when it is run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
import mutations
from targets import Target, make_seeds, targets

LONG = 20_000
MEMORY_BYTES, CPU_S, WALL_S, MOST_CHARACTERS = 2**30, 10, 60, 500
BATCH = 54
"""Cases of one process: a fork costs four times what most cases do."""
_MEMORY = Path("/dev/shm")
"""Cases stand in memory: what they write is synced to the disk, which is most of what conversions take there."""
_TRACEBACK, _WROTE, _RAN = 97, 98, 99
_SILENCE_S = 900.0
"""After which the process of a batch is ended from outside; it ends itself long before."""
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
    """Run ``count`` cases of ``seed``, the targets in turn; what looks wrong in a batch is run again alone."""
    make_seeds(folder / "seeds")
    _load(folder)
    number = 0
    while number < count:
        # The whole batch first: its process and that of a case that is run again would share one folder.
        for outcome in list(_batch(seed, range(number, min(count, number + BATCH)), folder)):
            number += 1
            yield run_case(seed, number - 1, folder) if outcome.problem else outcome


def run_case(seed: int, number: int, folder: Path) -> Outcome:
    """Run case ``number`` of ``seed`` in a process of its own."""
    return next(iter(_batch(seed, range(number, number + 1), folder)))


def _batch(seed: int, numbers: range, folder: Path) -> Iterator[Outcome]:
    """Yield the outcomes of a forked process that runs one case after the other; the last is the one that ended it."""
    known = targets()
    ours, theirs = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _become(seed, numbers, folder, theirs)
    os.close(theirs)
    number = numbers.start
    for line in _lines(ours):
        yield Outcome(**json.loads(line))
        number += 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if number < numbers.stop:
        code, problem = os.waitstatus_to_exitcode(status), ""
        if code < 0:
            hung = -code in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
            problem = "hang" if hung else f"signal {-code}"
        yield _outcome(known[number % len(known)], f"{seed}:{number}", code, problem, folder)


def _lines(source: int) -> Iterator[bytes]:
    """Yield the lines of a pipe until it is closed or nothing comes for longer than a case may take."""
    rest = b""
    with os.fdopen(source, "rb", buffering=0) as stream:
        while select.select([stream], [], [], _SILENCE_S)[0] and (more := stream.read(65536)):
            *lines, rest = (rest + more).split(b"\n")
            yield from lines


def _outcome(target: Target, seed: str, code: int, problem: str, folder: Path) -> Outcome:
    printed = folder / "printed"
    text = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
    if (folder / "case" / mutations.CANARY).exists():
        problem = "code run"
    return Outcome(target.name, seed, code, problem or _improper(code, text), text[-20_000:])


def _prepare(target: Target, seed: str, folder: Path) -> Path:
    """Make a fresh copy of the target's good files, with the change."""
    source = random.Random(seed)
    work = folder / "case"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "seeds" / target.seeds, work)
    file = next(work.glob(target.file))
    if source.random() < _MISPLACED:
        mutations.misplace(file, source)
    else:
        file.write_bytes(target.mutation(file.read_bytes(), source))
    return work


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


def _become(seed: int, numbers: range, folder: Path, tell: int) -> None:
    """Run cases in this process, which never returns from here."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        grown = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (grown + MEMORY_BYTES, grown + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        known, guard = targets(), _Guard()
        for number in numbers:
            target, name = known[number % len(known)], f"{seed}:{number}"
            work = _prepare(target, name, folder)
            code = _limited_call(target, work, folder / "printed", guard)
            outcome = _outcome(target, name, code, "", folder)
            os.write(tell, json.dumps(vars(outcome)).encode() + b"\n")
            os.chdir("/")
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(_TRACEBACK)


def _limited_call(target: Target, work: Path, printed: Path, guard: _Guard) -> int:
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(work)
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
    _begin_clock()
    code = _TRACEBACK
    guard.begin(work, target.argv[0] == "doctor")
    try:
        code = _call(target)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        guard.end()
        signal.alarm(0)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _begin_clock() -> None:
    """End this process where a case takes ``WALL_S`` without waiting for a core: it waits for something else."""
    begun, waited = time.monotonic(), _waited_s()

    def look(*_: object) -> None:
        left = WALL_S - (time.monotonic() - begun) + (_waited_s() - waited)
        signal.signal(signal.SIGALRM, look if left > 0 else signal.SIG_DFL)
        signal.alarm(max(1, math.ceil(left)))

    signal.signal(signal.SIGALRM, look)
    signal.alarm(WALL_S)


def _waited_s() -> float:
    """Return how long this process has stood in the queue for a core; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


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


class _Guard:
    """Ends this process where a case writes outside its folder or starts a program that is not ours."""

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] | None = None
        self._asks_the_node = False
        sys.addaudithook(self._hook)

    def begin(self, work: Path, asks_the_node: bool) -> None:
        """Guard from now on.

        ``asks_the_node``: the doctor runs the node's own tools; a program of the file's is told by the canary.
        """
        self._asks_the_node = asks_the_node
        self._allowed = (str(work.resolve()), os.devnull, tempfile.gettempdir() + "/torch", "/dev/shm/torch_")

    def end(self) -> None:
        """Let this process write again."""
        self._allowed = None

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._allowed is None:
            return
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and isinstance(path, (str, bytes)):
                place = os.path.realpath(os.fsdecode(path))
                if not place.startswith(self._allowed) and "__pycache__" not in place:
                    os.write(2, f"wrote {place}\n".encode())
                    os._exit(_WROTE)
        elif event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn"):
            command = arguments[1] if event == "subprocess.Popen" else arguments
            own = isinstance(command, (list, tuple)) and list(command[:3]) in (
                [sys.executable, "-m", "mindspeed_autoparallel.planner.workers"],
                [sys.executable, "-m", "mindspeed_autoparallel.planner.layouts.workers"],
            )
            if not own and not self._asks_the_node:
                os.write(2, f"ran {command!r}\n".encode())
                os._exit(_RAN)


def _load(folder: Path) -> None:
    """Load here what every command loads, so that a case costs milliseconds; every good file must end with 0."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _keep_parsers()
    for target in targets():
        for name in _modules_of(target, folder):
            with contextlib.suppress(ImportError):  # some modules of extensions are no modules by that name
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _keep_parsers() -> None:
    """Build the parser of every command once: that is a third of what most cases take, and no file changes it."""
    from mindspeed_autoparallel.cli import main as cli

    build, kept = cli.build_parser, {}
    cli.build_parser = lambda argv: kept[argv[0]] if argv[0] in kept else kept.setdefault(argv[0], build(argv))
    for target in targets():
        if not target.argv[0].startswith("call:"):
            cli.build_parser(target.argv)


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
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        folder = Path(name)
        (folder / "seeds").mkdir()
        if arguments.case:
            seed, _, number = arguments.case.partition(":")
            make_seeds(folder / "seeds")
            _load(folder)
            print(run_case(int(seed), int(number), folder))
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
