"""Traces of the user's model by point, kept under a hash of their inputs; only missing ones are traced."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, LaunchError, ProfileError
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import PLAIN, TraceResult, VariantName, read_trace, trace_of
from mindspeed_autoparallel.progress import changes_logged
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import without_places
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.planning import SearchPlan
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchStatus, worst
from mindspeed_autoparallel.runtime.profiling.measure.structure import MIN_LAYERS
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask
from mindspeed_autoparallel.runtime.profiling.trace.process import hash_of_sources
from mindspeed_autoparallel.runtime.profiling.trace.task import TraceTask
from mindspeed_autoparallel.runtime.profiling.trace.work_queue import WorkQueue

_LOGGER = logging.getLogger(__name__)
_MAX_PROCESSES = 8


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A tracing process that has ended."""

    outcome: LaunchOutcome
    at: MeasuredAt | None
    """The point that it had claimed and not finished; ``None`` during the script's set-up."""

    @property
    def looks_like_memory(self) -> bool:
        """Return whether it reported out of memory, or was killed by the system, which gives no reason."""
        return self.outcome.status is LaunchStatus.OUT_OF_MEMORY or self.outcome.exit_code == -signal.SIGKILL


class Attempts:
    """Rounds of ``num_processes`` tracing processes; halved when memory seems to run short."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.backwards = False
        """Whether points are handed out from the last on: the script sets itself up in its first point."""
        self._second: set[MeasuredAt] = set()

    def lost(
        self, ended: Sequence[Ended], left: Collection[MeasuredAt], *, came_forward: bool, starts: bool
    ) -> dict[MeasuredAt, LaunchOutcome]:
        """Return the points among ``left`` that are not retried, with the outcome of their process.

        ``left``: points that the round did not finish. ``came_forward``: whether it finished any. ``starts``: whether
        any point has a result, which shows that the script starts; if not, an error of the script ends the search.
        """
        dead = [end for end in ended if end.outcome.status is not LaunchStatus.OK]
        if any(end.looks_like_memory for end in dead):
            self.num_processes = max(1, self.num_processes // 2)
        lost = {}
        for end in dead:
            if end.at in left and end.at is not None:
                if end.looks_like_memory and end.at not in self._second:
                    self._second.add(end.at)
                    came_forward = True
                else:
                    lost[end.at] = end.outcome
        if lost or came_forward:
            return lost
        # Nothing to retry or blame: try from the last point on, unless a process hung, as it would hang again.
        reason = worst([end.outcome for end in dead])
        if reason.is_the_scripts_own and not starts:
            raise LaunchError(f"the script does not start, so nothing can be traced or measured: {reason.describe()}")
        if not self.backwards and reason.status is not LaunchStatus.TIMED_OUT:
            self.backwards = True
            return {}
        return dict.fromkeys(left, reason)


def measure_task(
    request: TuningRequest,
    points: tuple[MeasuredAt, ...],
    folder: Path,
    num_layers: int = MIN_LAYERS,
    kinds: Mapping[str, Sequence[int]] | None = None,
) -> MeasureTask:
    """Return the task for the first ``num_layers`` layers at ``points``; ``kinds``: kinds of all layers, by stack."""
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
        """Take ``headroom_bytes``, the memory of a rank: variants that fit without recompute are traced without it."""
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
        """Return the finished points, including failed ones, except those traced without recompute because of more
        headroom."""
        files = {point: self._task.result_file(point) for point in self._task.points}
        found = {point: read_trace(file) for point, file in files.items() if file.exists()}
        return {point: result for point, result in found.items() if result.headroom_bytes <= self.headroom_bytes}

    def take(self, launches: Launches) -> tuple[dict[MeasuredAt, TraceResult], dict[str, str]]:
        """Trace the missing points in a few processes; a point that ends its process is recorded and skipped.

        Returns the points that Megatron accepts, traced or not, and ``{layouts: reason}`` of the others.
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
                    raise ProfileError(f"the trace ended without an error but lacks points; see {logs}.")
                raise ProfileError(
                    f"{sys.argv[0]} ended before training started, so there is nothing to trace. It must call "
                    f"megatron.training.pretrain; its output is in {logs}."
                )
            came_forward = len(left) < len(missing)
            for point, outcome in attempts.lost(ended, left, came_forward=came_forward, starts=bool(found)).items():
                found[point] = self._give_up(point, outcome)
        return self._without_refused(found)

    def _round(self, launches: Launches, points: list[MeasuredAt], number: int) -> list[Ended]:
        """Run ``number`` processes that share ``points``, each with its own first one; return their outcomes."""
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
        """Return the points that Megatron accepts, and ``{layouts: reason}`` of those that it refuses."""
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
        return TraceTask(
            measure=measure_task(self.request, tuple(points), self.folder),
            variants=self.variants,
            wanted=tuple(map(self._wanted, points)),
            world_size=self.request.num_ranks,
            queue=str(self._queue.folder),
            process=process,
            headroom_bytes=self.headroom_bytes,
        ).to_json()

    def _wanted(self, point: MeasuredAt) -> tuple[str, ...]:
        """Return variants that differ at ``point``; the script's own comes first."""
        titles = [way.title for way in self.plan.variants if way.applies_to(point)]
        return tuple(name for name in self.variants if VariantName.parse(name).variant in titles)

    def _forget_given_up(self) -> None:
        """Retry points whose process failed or hung in an earlier run: a longer time limit or another machine may
        help."""
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
                ],
                default=str,
            ).encode()
        )
        return digest.hexdigest()[:16]


def tell_untraced(
    failed: Collection[MeasuredAt], measured: Collection[MeasuredAt], found: Mapping[MeasuredAt, TraceResult]
) -> tuple[list[str], dict[str, str]]:
    """Return notes on layouts that were measured instead of traced, and ``{layouts: reason}`` of the others.

    ``failed``: layouts without a trace; ``found``: results with the error messages.
    """
    whole = _by_reason({point: found[point] for point in failed if point in measured})
    lost = _by_reason({point: found[point] for point in failed if point not in measured})
    return (
        [f"{names} could not be traced; measured whole instead: {reason}" for names, reason in whole.items()],
        {
            names: f"could neither be traced nor be measured whole on the measuring devices: {reason}"
            for names, reason in lost.items()
        },
    )


def tell_refused(refused: Mapping[MeasuredAt, TraceResult]) -> dict[str, str]:
    """Return ``{layouts: reason}`` of layouts that Megatron itself refuses."""
    return {names: f"Megatron refuses it: {reason}" for names, reason in _by_reason(refused).items()}


def _by_reason(results: Mapping[MeasuredAt, TraceResult]) -> dict[str, str]:
    """Return ``{layouts: reason}``, layouts that share a reason together."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for point, result in results.items():
        groups[result.summary].append(point.label())
    return {
        labels[0] if len(labels) == 1 else f"{len(labels)} layouts ({labels[0]} to {labels[-1]})": reason
        for reason, labels in groups.items()
    }


def num_written(files: Iterable[Path], since: float) -> int:
    """Count those of ``files`` that were written after ``since`` (seconds of the clock), not by an earlier run."""
    return sum(_is_newer(file, since) for file in files)


def _is_newer(file: Path, since: float) -> bool:
    try:
        return file.stat().st_mtime >= since
    except OSError:  # missing so far
        return False
