"""Run many searches in one work folder, two at a time: nothing piles up, and one of two at once waits for no other.

  python tests/robustness/many_searches.py --count 200

The searches are forked from a process that has imported the package and Megatron as the script does, with the search's
command line. The first measures; the others find its measurements. Of two that overlap one may be refused, in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from kill_jobs import ROOT, Job, searches

REFUSED = "another run uses"


def started(script: str, folder: Path, printed: Path) -> int:
    """Fork a search; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 97
    try:
        os.chdir(folder)
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        run(script, "__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(script: str, name: str) -> None:
    """Run the training script's text under a module name."""
    exec(compile(Path(script).read_text(), script, "exec"), {"__name__": name, "__file__": script})


def state(folder: Path) -> dict[str, int]:
    """Return what may pile up: files and bytes of the folder, temporary files, descriptors and children of this process."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("printed")]
    return {
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "temporary": len(list((folder / "temporary").rglob("*"))),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    }


def searched(job: Job, folder: Path, count: int, seconds: float) -> tuple[Counter[str], set[str], dict[str, int]]:
    """Run ``count`` searches two at a time; return their endings, their results, and the state after the first."""
    endings, results, begin = Counter[str](), set[str](), time.monotonic()
    first: dict[str, int] = {}
    script = job.argv[1]
    for number in range(0, count, 2):
        together = 2 if first else 1
        pids = [started(script, folder, folder / f"printed-{index}") for index in range(together)]
        for index, pid in enumerate(pids):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            text = (folder / f"printed-{index}").read_text(errors="replace")
            refused = code == 2 and REFUSED in text
            endings["refused" if refused else "done" if code == 0 else f"code {code}"] += 1
            if code and not refused:
                print(text[-2000:])
        results.add(job.result(folder))
        first = first or state(folder)
        if number % 40 == 0:
            print(f"{number}: {time.process_time():.0f} processor s, {dict(endings)}, {state(folder)}", flush=True)
        if time.monotonic() - begin > seconds:
            break
    return endings, results, first


def main() -> int:
    """Print the endings, and the state after the first search and after the last; 1 where anything grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    (job,) = searches()
    os.environ.update(OMP_NUM_THREADS="1", MINDSPEED_AUTOPARALLEL_DEVICE="cpu", PYTHONPATH=str(ROOT))
    sys.argv = list(job.argv[1:])
    run(job.argv[1], "imported")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job.prepare(folder)
        (folder / "temporary").mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
        endings, results, before = searched(job, folder, arguments.count, arguments.seconds)
        after = state(folder)
    grown = {what: (before[what], number) for what, number in after.items() if number > before[what]}
    print(json.dumps({"endings": endings, "results": sorted(results), "first": before, "last": after}))
    return 1 if grown or len(results) != 1 or set(endings) - {"done", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main())
