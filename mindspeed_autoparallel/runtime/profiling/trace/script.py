"""The model of a user's own training script in one layout: traced as the script builds it, custom layers included."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, LaunchError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import BlockTrace, record_of
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes
from mindspeed_autoparallel.runtime.megatron.layout_arguments import recompute_arguments
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask
from mindspeed_autoparallel.runtime.profiling.trace.process import hash_of_sources
from mindspeed_autoparallel.runtime.profiling.trace.task import TraceTask
from mindspeed_autoparallel.runtime.profiling.trace.work_queue import WorkQueue

_REFUSED = "ConfigError: "
"""The line with which a traced script ends whose arguments this package refuses."""


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script's command line, and the layout to trace its model in."""

    script: Path
    arguments: tuple[str, ...]
    point: MeasuredAt
    world: int = 0
    """0: the smallest world that holds the layout."""
    recompute: str = "none"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the world."""
        return self.world or self.point.tensor_size * self.point.context_size * self.point.expert_size


@dataclass(frozen=True)
class ScriptTrace:
    """The blocks of a script's model in one layout."""

    document: Mapping[str, object]
    """Stored and printed form: ``schema_version``, ``at`` (the layout) and the keys of ``BlockTrace``."""

    @property
    def blocks(self) -> BlockTrace:
        """Return the trace as a record; raises ``ConfigError`` if the stored document is not a trace."""
        return record_of(self.document, "stored trace", BlockTrace)


def trace_script(request: ScriptRequest, cache: Path | None = None, timeout_s: float = 600) -> ScriptTrace:
    """Return blocks of every module of the script's model, with parameters, bytes, operators and collectives.

    They come from ``cache`` if the same script, files of its folder, arguments and layout were traced before. Raises
    ``ConfigError`` if the script does not exist, ``LaunchError`` with the reason if it does not reach training or
    cannot be traced.
    """
    if not request.script.is_file():
        raise ConfigError(f"--script {request.script}: there is no such file.")
    for sizes in (("tensor_size", "context_size"), ("expert_size",)):
        own = {name: getattr(request.point, name) for name in sizes}
        if request.num_ranks % math.prod(own.values()):
            told = " x ".join(f"{name.replace('_size', '')} {size}" for name, size in own.items())
            raise ConfigError(f"world {request.num_ranks} is not a multiple of {told}.")
    stored = None if cache is None else cache / f"{_content_key(request)}.json"
    if stored is not None and stored.exists():
        return ScriptTrace(read_json(stored, "stored trace"))
    result = _run(request, timeout_s)
    if stored is not None:
        write_json_atomic(stored, result)
    return ScriptTrace(result)


def _run(request: ScriptRequest, timeout_s: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        task = MeasureTask(points=(request.point,), result_dir=folder, num_layers={}, model=None)
        queue = WorkQueue(Path(folder) / "queue")
        queue.publish(task.points, 1)
        spec = LaunchSpec(
            launch_id=f"trace-{os.getpid()}",
            argv=(str(request.script), *request.arguments),
            environment={"MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"},
            task=TraceTask(
                measure=task,
                variants={request.recompute: recompute_arguments(request.recompute)},
                wanted=((request.recompute,),),
                world_size=request.num_ranks,
                queue=str(queue.folder),
            ).to_json(),
            timeout_s=timeout_s,
        )
        outcome = run_local_processes(spec, LocalRanks(), log_dir=Path(folder) / "logs")
        file = task.result_file(request.point)
        if not file.exists():
            if told := [line for line in outcome.last_lines if line.startswith(_REFUSED)]:
                raise ConfigError(f"{request.script}: {told[-1].removeprefix(_REFUSED)}")
            raise LaunchError(
                f"{request.script} ended before training started, so there is nothing to trace; it must call "
                f"megatron.training.pretrain. {_how_it_ended(outcome)}"
            )
        written = read_json(file, "trace")
    if written["status"] != "ok":
        raise LaunchError(
            f"this model cannot be traced in {request.point.label()}; measure it instead (--auto-tuning does so by "
            f"itself). Reason:\n{written['reason']}"
        )
    traced: dict[str, object] = written["variants"][request.recompute]
    return {"schema_version": written["schema_version"], "at": asdict(request.point), **traced}


def _how_it_ended(outcome: LaunchOutcome) -> str:
    if outcome.status is LaunchStatus.OK:
        return "It ended without an error."
    return outcome.describe(log_is_kept=False)


def _content_key(request: ScriptRequest) -> str:
    """Hash the script, the Python files of its folder, its arguments, the layout and the tracing code."""
    digest = hash_of_sources(request.script)
    rest = [request.script.name, request.arguments, asdict(request.point), request.num_ranks, request.recompute]
    digest.update(json.dumps(rest).encode())
    return digest.hexdigest()[:32]
