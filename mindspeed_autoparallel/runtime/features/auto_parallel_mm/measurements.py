"""Finished measurements, kept in the work dir by what they depend on, and the launches for those still missing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import LaunchError, ProfileError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.runtime.launch import Coordinator, LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.profiling.measure.layer_kinds import MIN_LAYERS
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask

MEASUREMENT_SCHEMA_VERSION = 4
"""Older results lack figures; they are measured anew."""

_LOGGER = logging.getLogger(__name__)


class Measurements:
    """The results of a request, by point."""

    def __init__(self, request: SearchRequest, device_fingerprint: dict[str, Any]) -> None:
        self.request = request
        key = {
            "schema": MEASUREMENT_SCHEMA_VERSION,
            "model": request.description.model_hash,
            "device": device_fingerprint,
            "distributed_optimizer": request.distributed_optimizer,
            "num_devices": request.num_measuring,
            "arguments": _arguments_that_matter(sys.argv[1:]),
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.folder = request.work_dir / "measurements" / digest
        self._task = MeasureTask(
            points=request.points(),
            result_dir=str(self.folder),
            num_layers={module.name: MIN_LAYERS for module in request.description.modules},
            model_file=None,
        )

    def read(self) -> dict[MeasuredAt, dict[str, Any]]:
        """The finished points, whatever their status; unreadable files count as missing."""
        found = {}
        for point in self._task.points:
            file = self._task.result_file(point)
            if file.exists():
                found[point] = read_json(file, "measurement")
        return found

    def take(self, coordinator: Coordinator) -> dict[MeasuredAt, dict[str, Any]]:
        """Measure what is missing, in as few launches as possible; a point that crashes is recorded and passed over."""
        found = self.read()
        points = self._task.points
        if found:
            _LOGGER.info(f"{len(found)} of {len(points)} points were measured before and are reused ({self.folder})")
        while missing := [point for point in points if point not in found]:
            _LOGGER.info(
                f"measuring {len(missing)} points in one launch: {', '.join(point.label() for point in missing)}"
            )
            begin = time.monotonic()
            outcome = coordinator.launch(self._spec(missing))
            if coordinator.lost_nodes:
                # No fault of the point: a later run measures it.
                raise LaunchError(outcome.describe())
            finished = self.read()
            if outcome.status is not LaunchStatus.OK:
                unfinished = [point for point in missing if point not in finished]
                _LOGGER.info(outcome.describe())
                if unfinished:
                    self._give_up(unfinished[0], outcome.status.value, outcome.describe())
                    _LOGGER.info(
                        f"{unfinished[0].label()} is left out ({outcome.status.value}); going on with the others"
                    )
                finished = self.read()
            _LOGGER.info(f"launch finished in {time.monotonic() - begin:.0f} s")
            if set(finished) == set(found):
                raise ProfileError(f"the launch ended well but measured nothing; see {coordinator.log_dir}.")
            found = finished
        if not any(result["status"] == "ok" for result in found.values()):
            reasons = "\n".join(f"  {point.label()}: {result['reason']}" for point, result in found.items())
            raise ProfileError(f"no layout could be measured:\n{reasons}")
        return found

    def _spec(self, points: list[MeasuredAt]) -> LaunchSpec:
        from dataclasses import replace

        model_file = self._write_reduced_model()
        task = replace(self._task, points=tuple(points), model_file=model_file)
        return LaunchSpec(
            launch_id=f"measure-{os.getpid()}-{int(time.time())}",
            argv=(sys.argv[0], *sys.argv[1:]),
            task=task.to_json(),
            timeout_s=self.request.launch_timeout_s,
        )

    def _write_reduced_model(self) -> str | None:
        description = self.request.description
        if description.model_file is None:
            return None
        layers = self._task.num_layers
        reduced = description.with_layers(layers, {name: [count] for name, count in layers.items()})
        path = self.folder / "reduced_model.json"
        write_json_atomic(path, reduced)
        return str(path)

    def _give_up(self, point: MeasuredAt, status: str, reason: str) -> None:
        from dataclasses import asdict

        result = {"schema_version": MEASUREMENT_SCHEMA_VERSION, "at": asdict(point), "status": status, "reason": reason}
        write_json_atomic(self._task.result_file(point), result)


def _arguments_that_matter(argv: list[str]) -> list[str]:
    """The command line without what only says where to measure, where to plan for, or where to write."""
    ours = (
        "--auto-parallel",
        "--simulated",
        "--nnodes",
        "--nproc",
        "--master",
        "--node-rank",
        "--save",
        "--load",
        "--global-batch-size",
        "--micro-batch-size",
        "--tensor-model-parallel-size",
        "--train-iters",
        "--pipeline-model-parallel-size",
        "--log-interval",
        "--mm-model",
        "--tensorboard-dir",
    )
    kept, skip_value = [], False
    for word in argv:
        if word.startswith("--"):
            skip_value = word.startswith(ours)
        if not skip_value:
            kept.append(Path(word).name if "/" in word else word)
    return kept
