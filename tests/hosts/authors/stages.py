"""Runs trainings up to their checked arguments, forked from one process that has imported what they share.

``python stages.py KEPT [mindspeed] < trainings.jsonl > rows.jsonl``, KEPT being the rows of before, with the checkout on PYTHONPATH. A fork for each training
runs the authors' own program up to its call of ``main()`` with their command line; every stage is a fork of that: alone,
then under the flags of this project. It ends where Megatron has accepted the arguments, or where a first launch would begin.
MindSpeed chooses its patches while it is imported, so ``mindspeed`` imports neither it nor Megatron in front of the forks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kept_rows
import train
from forked_host import become, exit_code_of, fork, import_libraries, import_megatron
from forked_ranks import Program

ENDS = ("accepted", "planned", "refused", "host", "traceback", "timeout")
"""How a stage ends. ``refused``: one line of ours; ``host``: an error of the host's; ``traceback``: one through us."""
_LIMIT_S = 180
_OWN_ERRORS = re.compile(
    r"^(ConfigError|PlanError|ProfileError|PatchError|LaunchError|InfeasiblePlan): .*", re.MULTILINE
)
_SHOWN = re.compile(r"^(?:replaced by the plan: --(\S+?),|kept from the script: --(\S+?)\.)", re.MULTILINE)
_LAID_OUT = ("as native flags: ",)
_CLUSTER = ("--nnodes", "1", "--nproc-per-node", "2", "--node-rank", "0", "--master-addr", "localhost", "--master-port")


class Reached(BaseException):
    """The stage's end: nothing behind it is run."""

    ends_well = True


def main() -> None:
    """Serve one checkout."""
    kept, *mindspeed = sys.argv[1:]
    (import_libraries if mindspeed else import_megatron)()
    runs: dict[str, train.Run] | None = None
    for line in sys.stdin:
        task = json.loads(line)
        if runs is None:
            runs = train.kept_runs(row for (host, _), row in kept_rows.read(Path(kept)).items() if host == task["host"])
        row = {**task, "stages": stages(task)}
        if task["keep_plans"]:
            row["trained"] = train.trained(row, runs) if "plan" in row["stages"] else {}
        print(json.dumps(row), flush=True)


def stages(task: dict[str, Any]) -> dict[str, Any]:
    """Return how each stage of ``task`` (program, words, processes) ended."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        found = folder / "stages.json"
        status = os.waitpid(fork(lambda: _write_stages(task, folder, found)), 0)[1]
        if found.is_file():
            return dict(json.loads(found.read_text()))
        output = (folder / "import.log").read_text(errors="replace")
        lines = output.strip().splitlines() or [f"ends with {os.waitstatus_to_exitcode(status)} while it is imported"]
        return {"alone": {"seconds": 0.0, "end": "host", "line": lines[-1], "tail": output[-1500:]}}


def _write_stages(task: dict[str, Any], folder: Path, found: Path) -> int:
    file, words, log = Path(task["file"]), task["words"], folder / "import.log"
    places = {"WORLD_SIZE": str(task["processes"]), "RANK": "0", "LOCAL_RANK": "0"}
    if any("fsdp" in word for word in words):
        places["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # as their authors export it: Megatron asserts it
    become(file, words, folder, log, places)
    program = Program(str(file), None, words)
    begun = exit_code_of(program.prepare)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    task = {**task, "main": program.run if begun == 0 else None}
    found.write_text(json.dumps(_stages(task, folder)))
    return 0


def _stages(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = {"alone": _stage(task, folder, "alone", [], task["processes"])}
    if found["alone"]["end"] != "accepted":
        found["alone"].pop("output")
        return found
    cluster = [*_CLUSTER, "29871", "--simulated-nnodes", "1", "--simulated-nproc-per-node", str(task["devices"])]
    places = ["--auto-parallel-work-dir", "work", "--auto-parallel-output-dir", "out"]
    search = ["--auto-parallel-mm", *cluster, *places, "--auto-parallel-time-limit-s", "5"]
    computed = ["--profile-source", "analytic", "--profile-device", "H100"]
    if not task["brief"]:
        found["measured search"] = _stage(task, folder, "measured", search, 1)
        tuning = ["--auto-tuning", "--auto-tuning-ranks", "4", *cluster[:-4]]
        found["tuning"] = _stage(task, folder, "tuning", tuning, 1)
    found["search"] = _stage(task, folder, "search", [*search, *computed], 1)
    _train_by_plan("plan", task, folder, found)
    if not task["brief"] and _lean_search(task, folder, search, found):
        _train_by_plan("lean plan", task, folder, found)
    if task["keep_plans"] and "plan" in found:
        _name_trainings(task, folder, found)
    for row in found.values():
        row.pop("arguments", None)
        row.pop("output", None)
    return found


def _train_by_plan(name: str, task: dict[str, Any], folder: Path, found: dict[str, Any]) -> None:
    """Hand the plan that was found last to the authors' program."""
    file = folder / "out" / "plan.json"
    if not file.is_file():
        return
    layout = json.loads(file.read_text())["layout"]
    world = layout["pipeline_size"] * layout["tensor_size"] * layout["data_size"] * layout["context_size"]
    found[name] = _stage(task, folder, name, ["--auto-parallel-plan", "out/plan.json"], world)
    if task["keep_plans"]:
        found[name]["plan"] = file.read_text()
    found[name]["silent"] = _silent(task, found["alone"], found[name])


def _name_trainings(task: dict[str, Any], folder: Path, found: dict[str, Any]) -> None:
    """Give the trainings of ``task`` their keys: those of one process, and of its plans beside it."""
    words = train.of_one_process(train.flags_of(tuple(task["words"])))
    one = _stage({**task, "words": words}, folder, "one process", [], 1)
    if "arguments" not in one:
        return
    alone = found["alone"]["key"] = train.key_of(task["program"], 1, one["arguments"])
    for name in ("plan", "lean plan"):
        if "arguments" in found.get(name, {}):
            plan = json.loads(found[name]["plan"])
            more = (alone, plan["layout"], plan["stages"])
            found[name]["key"] = train.key_of(task["program"], 2, found[name]["arguments"], *more)


def _lean_search(task: dict[str, Any], folder: Path, search: list[str], found: dict[str, Any]) -> bool:
    """Search for nodes of one device with the least memory that is enough: a plan of stages and recompute."""
    file, profile = folder / "out" / "plan.json", folder / "work" / "profile.json"
    if not file.is_file() or not profile.is_file():
        return False
    file.unlink()
    from_file = [*search, "--auto-parallel-profile-file", "work/profile.json"]
    from_file[from_file.index("--simulated-nnodes") + 1] = str(task["devices"])
    from_file[from_file.index("--simulated-nproc-per-node") + 1] = "1"
    limit = "--auto-parallel-memory-limit-mib"
    least = _stage(task, folder, "least", [*from_file, limit, "1"], 1)
    enough = re.search(r"A memory limit of ([\d.]+) MiB|needs ([\d.]+) MiB of 1.0 MiB", least["output"])
    if enough is None:
        found["lean search"] = least
        return False
    found["lean search"] = _stage(
        task, folder, "lean", [*from_file, limit, enough[1] or str(float(enough[2]) + 0.1)], 1
    )
    return True


def _silent(task: dict[str, Any], alone: dict[str, Any], planned: dict[str, Any]) -> list[str]:
    """Return flags of the authors whose value the plan changed and no line names."""
    if planned["end"] != "accepted":
        return []
    shown = {name for pair in _SHOWN.findall(planned["output"]) for name in pair if name}
    native = next((line for line in planned["output"].splitlines() if line.startswith(_LAID_OUT)), "")
    shown |= {word[2:] for word in native.split() if word.startswith("--")}
    before, after = alone["arguments"], planned["arguments"]
    given = {word.partition("=")[0][2:].replace("-", "_") for word in task["words"] if word.startswith("--")}
    changed = sorted(name for name in given if name in before and before[name] != after.get(name))
    return [name for name in changed if name.replace("_", "-") not in shown]


def _stage(task: dict[str, Any], folder: Path, name: str, flags: list[str], world: int) -> dict[str, Any]:
    """Run the program with ``flags`` of ours in a fork."""
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    begin = time.monotonic()
    used = os.times()
    child = fork(lambda: _run(task, folder, log, result, flags, world))
    status = _wait(child, begin + _LIMIT_S)
    now = os.times()
    output = "".join(file.read_text(errors="replace") for file in (folder / "import.log", log) if file.is_file())
    seconds = now.children_user + now.children_system - used.children_user - used.children_system
    row: dict[str, Any] = {"seconds": round(seconds, 1), "output": output}
    own = _OWN_ERRORS.findall(output)
    if status is None:
        return {**row, "end": "timeout", "line": f"more than {_LIMIT_S} s"}
    if result.is_file():
        return {**row, "end": "accepted", "line": "", "arguments": json.loads(result.read_text())}
    if status == 0:
        return {**row, "end": "planned", "line": ""}
    line = next((text for text in reversed(output.splitlines()) if text.strip()), "")
    if own and "Traceback" not in output:
        lines = [text for text in output.splitlines() if _OWN_ERRORS.match(text)]
        return {**row, "end": "refused", "line": lines[-1]}
    through_us = "/mindspeed_autoparallel/" in re.sub(
        r"/mindspeed_autoparallel/(patching|runtime/megatron/parsing)\S*", "", output
    )
    end = "traceback" if "Traceback" in output and (through_us or flags) else "host"
    return {**row, "end": end, "line": line, "tail": output[-1500:]}


def _wait(child: int, deadline: float) -> int | None:
    """Return the child's exit code; ``None`` where it had to be killed."""
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(task: dict[str, Any], folder: Path, log: Path, result: Path, flags: list[str], world: int) -> int:
    if task["main"] is None:
        return 1
    become(Path(task["file"]), [*task["words"], *flags], folder, log, {"WORLD_SIZE": str(world)})
    _end_at_first_launch()
    _end_after_validation(result)
    return exit_code_of(task["main"])


def _end_after_validation(result: Path) -> None:
    """Write the arguments that Megatron has accepted, and end."""
    if "megatron" not in sys.modules:
        return  # the program imports it first thing, or is none of its trainings
    from megatron.training import arguments as module

    validate = module.validate_args

    def validated(given: Any, *args: Any, **kwargs: Any) -> Any:
        checked = validate(given, *args, **kwargs)
        values = vars(checked if checked is not None else given)
        result.write_text(json.dumps({name: repr(value) for name, value in values.items()}))
        raise Reached

    for other in list(sys.modules.values()):
        if getattr(other, "validate_args", None) is validate:
            other.validate_args = validated  # type: ignore[attr-defined]


def _end_at_first_launch() -> None:
    """Let a search that measures end where it would start processes."""
    from mindspeed_autoparallel.runtime.launch.coordinator import Coordinator

    def entered(self: Any) -> Any:
        raise Reached

    Coordinator.__enter__ = entered  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
