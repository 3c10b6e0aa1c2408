"""Import torch once, fork the ranks of one job, and write how each of them ended: the process behind ``run_ranks``.

Words: how many ranks, the scratch folder, and as JSON the program: its file, a function's name or null, its arguments.
Rank N reads ``in``, writes ``N.out`` and ``N.err``; ``N.code`` holds its exit code, or minus the signal that ended it.
``begun`` appears when all are forked. SIGTERM ends all ranks with whatever they started.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

RESULT = "RESULT "
"""A rank hands a result back as a line of standard output: this word and JSON (functions do it by returning)."""


def main() -> None:
    """Fork all ranks; in each of them run the program instead."""
    num_ranks, scratch, program = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    if num_ranks > 1:
        with contextlib.suppress(ImportError):
            import torch.distributed.tensor  # noqa: F401  # what megatron reads of torch, too, and no torch._dynamo
    ranks: dict[int, int] = {}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _become(rank, scratch)
            _run(*program)
            return
        ranks[pid] = rank
    alive = set(ranks)
    signal.signal(signal.SIGTERM, lambda *_: _kill(alive))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    (scratch / "begun").touch()
    while alive:
        pid, status = os.wait()
        alive.discard(pid)
        written = scratch / f"{ranks[pid]}.code.part"
        written.write_text(str(os.waitstatus_to_exitcode(status)))
        written.rename(scratch / f"{ranks[pid]}.code")
    _kill(set(ranks))  # what they started and left


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _become(rank: int, scratch: Path) -> None:
    """Take the rank's session, files and variables."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for number, name, flags in ((0, "in", os.O_RDONLY), (1, f"{rank}.out", _NEW), (2, f"{rank}.err", _NEW)):
        file = os.open(scratch / name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))


_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _run(file: str, name: str | None, arguments: list[object]) -> None:
    try:
        sys.path[0] = str(Path(file).parent)
        if name is None:
            sys.argv = [file, *map(str, arguments)]
            runpy.run_path(file, run_name="__main__")
        else:
            spec = importlib.util.spec_from_file_location("rank_program", file)
            assert spec is not None and spec.loader is not None
            module = sys.modules["rank_program"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            result = getattr(module, name)(*arguments)
            print(f"\n{RESULT}" + json.dumps(result))
            _end()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: the exit handlers of a broken process group may wait for its peers forever.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def _end() -> None:
    """Leave with 0 as the interpreter would, but without C++'s destructors of static objects.

    They abort now and then ("terminate called without an active exception") where a process group is still there,
    which most functions leave behind.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
