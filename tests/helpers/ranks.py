"""Start a program on several real processes that form one torch.distributed job, and collect what each rank said.

    from ranks import run_ranks

    def worker(size):                      # module level, JSON arguments, JSON result
        import torch.distributed as dist
        dist.init_process_group("gloo")
        return [dist.get_rank(), size]

    assert [rank.result for rank in run_ranks(2, worker, 8)] == [[0, 8], [1, 8]]

Environment as torchrun sets it, a port of its own, one thread per rank, the CPU device, a scratch working directory.
Every process is gone when the call returns, whatever happened.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.runtime.launch.ports import reserved_port

RESULT = "RESULT "
"""A rank hands a result back as a line of standard output: this word and JSON (functions do it by returning)."""

_RUN = f"""
import json, os, pathlib, runpy, sys, traceback
file, name, arguments = json.loads(sys.argv[1])
try:
    sys.path[0] = str(pathlib.Path(file).parent)
    if name is None:
        sys.argv = [file, *arguments]
        runpy.run_path(file, run_name="__main__")
    else:
        import importlib.util
        spec = importlib.util.spec_from_file_location("rank_program", file)
        module = sys.modules["rank_program"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, name)(*arguments)
        print("\\n{RESULT}" + json.dumps(result))
except BaseException as error:
    if isinstance(error, SystemExit) and not error.code:
        raise
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: the exit handlers of a broken process group may wait for its peers forever.
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
"""
_HERE = str(Path(__file__).parent)
_GRACE_S = 5.0
_TAIL_LINES = 25


def leave_with(result: Any) -> None:
    """End a script's part in the job: rank 0 hands ``result`` back, and no rank leaves before all are done."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print(RESULT + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class RankOutput:
    """What one rank left behind."""

    rank: int
    returncode: int
    """Negative: ended by that signal (a rank that outlived a failed one, or the time-out)."""
    stdout: str
    stderr: str

    @property
    def result(self) -> Any:
        """The last ``RESULT`` line's value; None when there is none."""
        lines = [line for line in self.stdout.splitlines() if line.startswith(RESULT)]
        return json.loads(lines[-1][len(RESULT) :]) if lines else None


def run_ranks(
    num_ranks: int,
    program: Path | str | Callable[..., Any],
    *arguments: Any,
    python_path: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    cwd: Path | None = None,
    stdin: str = "",
    check: bool = True,
) -> list[RankOutput]:
    """Run ``program`` on ``num_ranks`` processes; their outputs, by rank.

    ``program``: a script's path, Python source as text, or a module-level function (JSON arguments and result).
    ``python_path``: folders put before PYTHONPATH, such as another Megatron release.
    ``stdin``: what every rank reads from its standard input.
    ``check``: raise ``AssertionError`` with the last lines of the ranks that failed; False: hand the outputs back.
    A rank that fails ends the others after a few seconds, ``timeout_s`` ends all.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch, reserved_port() as port:
        Path(scratch, "in").write_text(stdin, encoding="utf-8")
        outputs, in_time = _run_once(
            num_ranks,
            _command(program, arguments, Path(scratch)),
            Path(scratch),
            cwd,
            python_path,
            {"MASTER_PORT": str(port), **(environment or {})},
            timeout_s,
        )
    failed = [output for output in outputs if output.returncode != 0]
    if check and failed:
        # The cause first: ranks that were ended, or lost their peer, come after the one that broke by itself.
        failed.sort(key=lambda output: (output.returncode < 0, "Connection" in output.stderr, output.rank))
        text = "" if in_time else f"not finished after {timeout_s:.0f} s\n"
        raise AssertionError(text + "\n".join(_failure(output) for output in failed))
    return outputs


def _command(program: Path | str | Callable[..., Any], arguments: tuple[Any, ...], scratch: Path) -> list[str]:
    if callable(program):
        name, file = program.__qualname__, inspect.getsourcefile(program)
        return [sys.executable, "-c", _RUN, json.dumps([file, name, arguments])]
    if isinstance(program, str):
        text, program = program, scratch / "program.py"
        program.write_text(text, encoding="utf-8")
    return [sys.executable, "-c", _RUN, json.dumps([str(program.resolve()), None, [str(item) for item in arguments]])]


def _run_once(
    num_ranks: int,
    command: list[str],
    scratch: Path,
    cwd: Path | None,
    python_path: Sequence[str | Path],
    environment: Mapping[str, str],
    timeout_s: float,
) -> tuple[list[RankOutput], bool]:
    """Outputs by rank, and whether all ended by themselves before the time-out."""
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        # This folder too: the module of a function imports its helpers again.
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, python_path), os.environ.get("PYTHONPATH"), _HERE])),
        **environment,
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            out, error = open(scratch / f"{rank}.out", "wb"), open(scratch / f"{rank}.err", "wb")
            with open(scratch / "in", "rb") as read, out, error:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=read,
                        stdout=out,
                        stderr=error,
                        cwd=cwd or scratch,
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,  # its own children can be ended with it
                    )
                )
        in_time = _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            _end(process)
    outputs = [
        RankOutput(rank, process.returncode, _text(scratch / f"{rank}.out"), _text(scratch / f"{rank}.err"))
        for rank, process in enumerate(processes)
    ]
    return outputs, in_time


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended (True), one has failed and the grace is over (True), or the deadline (False)."""
    broken_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now > deadline:
            return False
        if broken_at is None and any(process.poll() for process in processes):
            broken_at = now
        if broken_at is not None and now > broken_at + _GRACE_S:
            return True
        time.sleep(0.02)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group: the rank, and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _failure(output: RankOutput) -> str:
    tail = (output.stdout + output.stderr).splitlines()[-_TAIL_LINES:]
    return f"rank {output.rank} ended with {output.returncode}:\n" + "\n".join("    " + line for line in tail)
