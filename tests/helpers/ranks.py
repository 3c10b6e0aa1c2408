"""Start a program on several real processes that form one torch.distributed job, and collect what each rank said.

    from ranks import run_ranks

    def worker(size):                      # module level, JSON arguments, JSON result
        import torch.distributed as dist
        dist.init_process_group("gloo")
        return [dist.get_rank(), size]

    assert [rank.result for rank in run_ranks(2, worker, 8)] == [[0, 8], [1, 8]]

Environment as torchrun sets it, a port of its own, one thread per rank, the CPU device, a scratch working directory.
Every process is gone when the call returns, whatever happened. Ranks are forked from one process that has imported
torch and nothing else: reading torch takes longer than most of what is tested.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_python import forked_python
from forked_ranks import RESULT

from mindspeed_autoparallel.runtime.launch.ports import reserved_port

_HERE = Path(__file__).parent
_SHARED = (str(_HERE), str(_HERE.parents[1] / "docs" / "examples"))
"""Folders that every program imports from: these helpers, and the reference model."""
_GRACE_S = 5.0
_IMPORTS_S = 300.0
"""What importing torch may take on a busy machine; the ranks' own time begins after it."""
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


def _command(program: Path | str | Callable[..., Any], arguments: tuple[Any, ...], scratch: Path) -> list[Any]:
    """File, name of its function (None: the file is a script) and arguments."""
    if callable(program):
        return [inspect.getsourcefile(program), program.__qualname__, arguments]
    if isinstance(program, str):
        text, program = program, scratch / "program.py"
        program.write_text(text, encoding="utf-8")
    return [str(program.resolve()), None, [str(item) for item in arguments]]


class _Rank:
    """One rank: a child of the process that forks them, which writes how it ended."""

    def __init__(self, rank: int, scratch: Path, parent: subprocess.Popen[bytes]) -> None:
        self._parent, self._code = parent, scratch / f"{rank}.code"

    def poll(self) -> int | None:
        """Exit code, or minus the signal that ended it; what ended the parent where no rank had begun."""
        gone = self._parent.poll()
        if self._code.exists():
            return int(self._code.read_text())
        return None if gone is None else gone or 1


def _run_once(
    num_ranks: int,
    command: list[Any],
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
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, python_path), os.environ.get("PYTHONPATH"), *_SHARED])),
        **environment,
    }
    forking = [forked_python(), str(_HERE / "forked_ranks.py"), str(num_ranks), str(scratch), json.dumps(command)]
    with open(scratch / "forking.err", "wb") as error:
        parent = subprocess.Popen(
            forking, cwd=cwd or scratch, env=common, stdin=subprocess.DEVNULL, stdout=error, stderr=error
        )
    ranks = [_Rank(rank, scratch, parent) for rank in range(num_ranks)]
    try:
        begun = time.monotonic() + _IMPORTS_S
        while not (scratch / "begun").exists() and parent.poll() is None and time.monotonic() < begun:
            time.sleep(0.02)
        in_time = _wait(ranks, time.monotonic() + timeout_s)
    finally:
        parent.terminate()
        parent.wait()
    before = _text(scratch / "forking.err")
    outputs = [
        RankOutput(rank, ended.poll() or 0, _text(scratch / f"{rank}.out"), before + _text(scratch / f"{rank}.err"))
        for rank, ended in enumerate(ranks)
    ]
    return outputs, in_time


def _wait(processes: list[_Rank], deadline: float) -> bool:
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


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _failure(output: RankOutput) -> str:
    tail = (output.stdout + output.stderr).splitlines()[-_TAIL_LINES:]
    return f"rank {output.rank} ended with {output.returncode}:\n" + "\n".join("    " + line for line in tail)
