"""Finished measurements, kept in the work dir under a hash of their inputs, and the launches for missing ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, LaunchError, ProfileError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles import LinkTier, MeasuredAt
from mindspeed_autoparallel.profiles.records import PointResult, json_of, record_of
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.attempts import Attempts
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.runtime.flags.registration import without_unmeasured
from mindspeed_autoparallel.runtime.flags.switches import SWITCHES
from mindspeed_autoparallel.runtime.launch.coordinator import Coordinator
from mindspeed_autoparallel.runtime.launch.orders import own_command
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
from mindspeed_autoparallel.runtime.profiling.measure.structure import MIN_LAYERS, fewest_layers
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask, PlayedWorld
from mindspeed_autoparallel.runtime.profiling.sources.device_cost import played_links

MEASUREMENT_SCHEMA_VERSION = 4
"""Version of the result files; points with older ones are measured again."""

_KEPT = ("ok", "out_of_memory")
"""Statuses of the results that later runs reuse."""
_MEASURED = frozenset({"modules", "optimizer", "memory_capacity_bytes", "host_bytes", "links", "tied_embeddings"})
_LOGGER = logging.getLogger(__name__)


class Measurements:
    """The results of a request, by point.

    ``between_nodes``: measured links between nodes, for a device that plays ranks.
    """

    def __init__(
        self, request: SearchRequest, device_fingerprint: Mapping[str, object], between_nodes: LinkTier | None = None
    ) -> None:
        self.request = request
        key = {
            "schema": MEASUREMENT_SCHEMA_VERSION,
            "model": request.description.model_hash,
            "device": device_fingerprint,
            "distributed_optimizer": request.distributed_optimizer,
            "num_devices": request.num_measuring,
            "arguments": _arguments_that_matter(sys.argv[1:]),
        }
        num_layers = {
            module.name: fewest_layers(request.layer_choices.get(module.name, ()))
            for module in request.description.modules
        }
        if set(num_layers.values()) != {MIN_LAYERS}:
            key["layers"] = num_layers
        with_lengths = request.sample_data is not None
        if with_lengths:
            key["lengths"] = True
        played = _played_world(request, str(device_fingerprint["device"]), between_nodes)
        if played is not None:
            key["played"] = json_of(played)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.folder = request.work_dir / "measurements" / digest
        self._task = MeasureTask(
            points=request.points(),
            result_dir=str(self.folder),
            num_layers=num_layers,
            model=None,
            with_lengths=with_lengths,
            played=played,
        )

    def read(self) -> dict[MeasuredAt, dict[str, object]]:
        """Read the points that launches have finished, with any status; damaged files count as missing."""
        found = {}
        for point in self._task.points:
            with contextlib.suppress(ConfigError):
                found[point] = checked_result(read_json(self._task.result_file(point), "measurement"), point)
        return found

    def kept(self) -> dict[MeasuredAt, dict[str, object]]:
        """Read the points that earlier runs measured, or found too large for the device; other failures are retried."""
        return {point: result for point, result in self.read().items() if result["status"] in _KEPT}

    def take(self, coordinator: Coordinator) -> dict[MeasuredAt, PointResult]:
        """Measure the missing points, and return the figures of every point that can be measured."""
        return {
            point: record_of(result, f"measurement of {point.label()}", PointResult)
            for point, result in self.measure(coordinator).items()
            if result["status"] == "ok"
        }

    def measure(self, coordinator: Coordinator) -> dict[MeasuredAt, dict[str, object]]:
        """Measure the missing points in as few launches as possible; report those that cannot be measured.

        A launch that fails before its first point is retried with another point first; an error of the script, the same
        failure twice or several failures there end the search. An error of the script that two points share also ends
        it if no point has been measured; otherwise the layouts of both are not measured further. The ``ProfileError``
        is one line: the launches' last lines are logged.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self.kept()
        points = self._task.points
        if found:
            _LOGGER.info(f"{len(found)} of {len(points)} points were measured before and are reused ({self.folder})")
        for point in set(points) - set(found):
            self._task.result_file(point).unlink(missing_ok=True)
        attempts = Attempts(points)
        while missing := attempts.order([point for point in points if point not in found]):
            _LOGGER.info(
                f"measuring {len(missing)} points in one launch: {', '.join(point.label() for point in missing)}"
            )
            begin = time.monotonic()
            self._task.begun_file().unlink(missing_ok=True)
            outcome = coordinator.launch(self._spec(missing))
            if coordinator.lost_nodes:
                # The point did not cause the failure: a later run measures it.
                raise LaunchError(outcome.describe())
            finished = {point: result for point, result in self.read().items() if point in missing}
            found |= finished
            _LOGGER.info(f"launch finished in {time.monotonic() - begin:.0f} s")
            if outcome.status is LaunchStatus.OK:
                if not finished:
                    raise ProfileError(
                        f"the launch ended without an error but measured nothing; see {coordinator.log_dir}."
                    )
                continue
            _LOGGER.info(outcome.describe())
            unfinished = [point for point in missing if point not in finished]
            none_measured = not any(result["status"] == "ok" for result in found.values())
            blamed = attempts.failed(outcome, self._begun(), unfinished, none_measured=none_measured)
            found |= {point: self._unmeasured(point, outcome) for point in blamed}
        self._tell(found)
        return found

    def _begun(self) -> MeasuredAt | None:
        """Return the point that the last launch was measuring; ``None`` if it had not reached one."""
        with contextlib.suppress(ConfigError):
            label = read_json(self._task.begun_file(), "mark of a measuring launch")
            return next((point for point in self._task.points if point.label() == label), None)
        return None

    def _unmeasured(self, point: MeasuredAt, outcome: LaunchOutcome) -> dict[str, object]:
        # For this run only: no file records that the point cannot be measured.
        _LOGGER.warning(f"{point.label()} is left out ({outcome.status.value}); measuring the others")
        return {
            "schema_version": MEASUREMENT_SCHEMA_VERSION,
            "at": asdict(point),
            "status": outcome.status.value,
            "reason": outcome.describe(),
        }

    def _tell(self, found: dict[MeasuredAt, dict[str, object]]) -> None:
        """Log which points were not measured; ``ProfileError`` if none was."""
        if not any(result["status"] == "ok" for result in found.values()):
            reasons = "\n".join(f"  {point.label()}: {result['reason']}" for point, result in found.items())
            raise ProfileError(f"no layout could be measured:\n{reasons}")
        failed = [point.label() for point, result in found.items() if result["status"] not in _KEPT]
        if failed:
            _LOGGER.warning(
                f"{len(failed)} of {len(found)} points were not measured: {', '.join(failed)}. The plan estimates them "
                "from the others; the same command tries them again."
            )

    def _spec(self, points: list[MeasuredAt]) -> LaunchSpec:
        from dataclasses import replace

        task = replace(self._task, points=tuple(points), model=self._reduced_model())
        return LaunchSpec(
            launch_id=f"measure-{os.getpid()}-{int(time.time())}",
            argv=own_command(),
            environment={ALONE_VARIABLE: str(task.played.num_ranks)} if task.played is not None else {},
            task=task.to_json(),
            timeout_s=self.request.launch_timeout_s,
        )

    def _reduced_model(self) -> dict[str, object] | None:
        """Return the reduced model.json; every node writes its own copy, because nodes may share no storage."""
        description = self.request.description
        if description.model_file is None:
            return None
        layers = self._task.num_layers
        return description.with_layers(layers, {name: [count] for name, count in layers.items()})


def _arguments_that_matter(argv: list[str]) -> list[str]:
    """Return the command line without the flags for measuring nodes, the target cluster and output paths."""
    kept = without_unmeasured(argv, [switch.flag for switch in SWITCHES if switch.may_be_hosts])
    return [Path(word).name if "/" in word else word for word in kept]


def _played_world(request: SearchRequest, device_name: str, between_nodes: LinkTier | None) -> PlayedWorld | None:
    """Return the ranks that the only measuring device plays; ``None`` if each measured rank is a device."""
    if not request.num_played:
        return None
    tiers, source = played_links(device_name, request.link_device, request.cluster_devices_per_node, between_nodes)
    return PlayedWorld(
        num_ranks=request.num_played, devices_per_node=request.cluster_devices_per_node, tiers=tiers, links_from=source
    )


def checked_result(result: Any, point: MeasuredAt) -> dict[str, object]:
    """Return ``result`` if it is a measurement of ``point``; ``ConfigError`` for any other content of its file."""
    good = isinstance(result, dict) and result.get("at") == asdict(point) and isinstance(result.get("status"), str)
    if good and result["status"] != "ok":
        good = isinstance(result.get("reason"), str)
    if good and result["status"] == "ok":
        good = result.keys() >= _MEASURED and isinstance(result["modules"], list) and bool(result["modules"])
    if not good:
        raise ConfigError(f"the file of {point.label()} holds no measurement of it.")
    return dict(result)
