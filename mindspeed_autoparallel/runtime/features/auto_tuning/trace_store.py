"""Traces of the user's model by point, kept by what they depend on; only missing ones are traced."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import PLAIN, TraceResult, VariantName, read_trace, trace_of
from mindspeed_autoparallel.progress import changes_logged
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions import SearchPlan
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.trace_attempts import Attempts, Ended
from mindspeed_autoparallel.runtime.features.auto_tuning.trace_failures import tell_refused
from mindspeed_autoparallel.runtime.launch import LaunchOutcome, LaunchStatus
from mindspeed_autoparallel.runtime.profiling.measure.layer_kinds import MIN_LAYERS
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask
from mindspeed_autoparallel.runtime.profiling.trace.sources import hash_of_sources
from mindspeed_autoparallel.runtime.profiling.trace.work_queue import WorkQueue

_PLACES = (
    "--auto-tuning",
    "--auto-parallel-data",
    *("--auto-parallel-mm", "--auto-parallel-calibrate", "--auto-parallel-check-steps", "--auto-parallel-work-dir"),
    *("--auto-parallel-output-dir", "--auto-parallel-memory-limit-mib", "--auto-parallel-time-limit-s"),
    *("--auto-parallel-profile-file", "--auto-parallel-launch-timeout-s", "--auto-parallel-preflight"),
    "--auto-parallel-elastic",
    *("--simulated-nnodes", "--simulated-nproc-per-node", "--profile-source", "--profile-device"),
    *("--operator-search", "--operator-config", "--operator-pin", "--operator-explain", "--operator-devices"),
    *("--operator-output-dir", "--parallel-mode", "--search-mode", "--auto-pipeline", "--mem-coeff"),
    "--nnodes",
    "--nproc-per-node",
    "--master",
    "--node-rank",
    "--save",
    "--load",
    "--train-iters",
    "--log-interval",
    "--tensorboard-dir",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--micro-batch-size",
    "--global-batch-size",
    "--data-cache-path",
    "--wandb",
)
"""Beginnings of flags that only name places, or what is searched anyway; a test checks all of ours."""
_LOGGER = logging.getLogger(__name__)
_MAX_PROCESSES = 8


def measure_task(
    request: TuningRequest,
    points: tuple[MeasuredAt, ...],
    folder: Path,
    num_layers: int = MIN_LAYERS,
    kinds: Mapping[str, Sequence[int]] | None = None,
) -> MeasureTask:
    """Return the first ``num_layers`` layers of the model at ``points``; ``kinds``: of all its layers, by stack."""
    return MeasureTask(
        points=points,
        result_dir=str(folder),
        num_layers={module.name: num_layers for module in request.description.modules},
        model=None,
        with_steps=True,
        kinds={name: tuple(row) for name, row in (kinds or {}).items()},
    )


class Traces:
    """The traces of a request."""

    def __init__(self, request: TuningRequest, plan: SearchPlan, headroom_bytes: int) -> None:
        """Take ``headroom_bytes`` of a device for the training; where that is plenty, recompute is not traced."""
        self.request = request
        self.plan = plan
        self.headroom_bytes = headroom_bytes
        self.variants = {
            str(VariantName(way.title, kind)): {**way.settings, **recompute}
            for way in plan.variants
            for kind, recompute in {PLAIN: {}, **plan.recompute}.items()
        }
        self.key = self._key()
        self.folder = request.work_dir / "traces" / self.key
        self._task = measure_task(request, plan.points, self.folder)
        self._queue = WorkQueue(self.folder / "queue")

    def read(self) -> dict[MeasuredAt, TraceResult]:
        """Return the finished points, failed ones too, unless they lack what more headroom made unnecessary."""
        files = {point: self._task.result_file(point) for point in self._task.points}
        found = {point: read_trace(file) for point, file in files.items() if file.exists()}
        return {point: result for point, result in found.items() if result.headroom_bytes <= self.headroom_bytes}

    def take(self, launches: Launches) -> tuple[dict[MeasuredAt, TraceResult], dict[str, str]]:
        """Trace what is missing in a few processes; a point that ends its process is recorded and passed over.

        Returns the points that Megatron takes, traced or not, and ``{layouts: reason}`` of the others.
        """
        self._forget_given_up()
        found = self.read()
        if found:
            _LOGGER.info(f"{len(found)} of {len(self._task.points)} points were traced before ({self.folder})")
        attempts = Attempts(max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // 2)))
        while missing := [point for point in self._task.points if point not in found]:
            _LOGGER.info(f"tracing {len(missing)} points x {len(self.variants)} variants on the CPU of this node")
            with changes_logged(self._progress(missing)):
                points = missing[::-1] if attempts.backwards else missing
                ended = self._round(launches, points, min(attempts.num_processes, len(missing)))
            found = self.read()
            left = [point for point in missing if point not in found]
            if left and all(end.outcome.status is LaunchStatus.OK for end in ended):
                logs = launches.coordinator.log_dir
                if found:
                    raise ProfileError(f"the trace ended well without all points; see {logs}.")
                raise ProfileError(
                    f"{sys.argv[0]} ended without coming to training, so there is nothing to trace. It must call "
                    f"megatron.training.pretrain; its output is in {logs}."
                )
            came_forward = len(left) < len(missing)
            for point, outcome in attempts.lost(ended, left, came_forward=came_forward, starts=bool(found)).items():
                found[point] = self._give_up(point, outcome)
        return self._without_refused(found)

    def _round(self, launches: Launches, points: list[MeasuredAt], number: int) -> list[Ended]:
        """Let ``number`` processes share ``points``, each beginning at its own; return how each of them ended."""
        self._queue.publish(points, number)
        try:
            starts = [process * len(points) // number for process in range(number)]
            outcomes = launches.traces(
                [self._order([*points[start:], *points[:start]], process) for process, start in enumerate(starts)]
            )
            finished = self.read()
            unfinished = [point for point in points if point not in finished]
            return [
                Ended(outcome=outcome, at=next((p for p in unfinished if self._queue.claimed_by(p, process)), None))
                for process, outcome in enumerate(outcomes)
            ]
        finally:
            self._queue.clear()

    def _without_refused(
        self, found: dict[MeasuredAt, TraceResult]
    ) -> tuple[dict[MeasuredAt, TraceResult], dict[str, str]]:
        """Leave out what Megatron refuses: it is not measured."""
        refused = {point: result for point, result in found.items() if result.failure and result.failure.refused}
        if len(refused) == len(found):
            reasons = "; ".join(sorted({result.summary for result in refused.values()}))
            raise ConfigError(f"Megatron refuses this model in every layout: {reasons}")
        taken = {point: result for point, result in found.items() if point not in refused}
        return taken, tell_refused(refused)

    def _progress(self, missing: list[MeasuredAt]) -> Callable[[], str]:
        files, started = [self._task.result_file(point) for point in missing], time.time()
        return lambda: f"traced {num_written(files, started)} of {len(files)} points"

    def _order(self, points: list[MeasuredAt], process: int) -> dict[str, object]:
        task = measure_task(self.request, tuple(points), self.folder)
        return {
            "kind": "trace",
            "measure": task.to_json(),
            "variants": self.variants,
            "world_size": self.request.num_ranks,
            "headroom_bytes": self.headroom_bytes,
            "queue": str(self._queue.folder),
            "process": process,
            "wanted": [self._wanted(point) for point in points],
        }

    def _wanted(self, point: MeasuredAt) -> list[str]:
        """Return variants that differ at ``point``; the script's own comes first."""
        titles = [way.title for way in self.plan.variants if way.applies_to(point)]
        return [name for name in self.variants if VariantName.parse(name).variant in titles]

    def _forget_given_up(self) -> None:
        """Try again what ended or hung in an earlier run: a longer time limit or another machine may do."""
        for point, result in self.read().items():
            if result.given_up:
                self._task.result_file(point).unlink()

    def _give_up(self, point: MeasuredAt, outcome: LaunchOutcome) -> TraceResult:
        result = {
            "at": asdict(point),
            "status": "failed",
            "given_up": True,
            "reason": outcome.describe(),
            "summary": outcome.summary(),
            "variants": {},
        }
        write_json_atomic(self._task.result_file(point), result)
        return trace_of(result, point.label())

    def _key(self) -> str:
        digest = hash_of_sources(Path(sys.argv[0]))
        digest.update(
            json.dumps(
                [
                    self.request.description.model_hash,
                    self.request.num_ranks,
                    self.variants,
                    without_places(sys.argv[1:]),
                    [self._wanted(point) for point in self.plan.points],
                    _release("torch"),
                    _release("megatron-core"),
                ],
                default=str,
            ).encode()
        )
        return digest.hexdigest()[:16]


def num_written(files: Iterable[Path], since: float) -> int:
    """Count those of ``files`` that were written after ``since`` (seconds of the clock), not by an earlier run."""
    return sum(_is_newer(file, since) for file in files)


def _is_newer(file: Path, since: float) -> bool:
    try:
        return file.stat().st_mtime >= since
    except OSError:  # not there yet
        return False


def _release(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "a source checkout"


def without_places(argv: Sequence[str]) -> list[str]:
    """Return a command line without flags that only say where something is, or what is searched anyway."""
    kept, skip = [], False
    for word in argv:
        if word.startswith("--"):
            skip = word.startswith(_PLACES)
        if not skip:
            kept.append(word)
    return kept
