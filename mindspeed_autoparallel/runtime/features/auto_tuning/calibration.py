"""Missing entries of the knowledge base for a model, the launch that measures them, and the resulting costs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from mindspeed_autoparallel.cost.collectives import p2p_us
from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.planner.tuner.anchors import choose
from mindspeed_autoparallel.planner.tuner.host import fit_host
from mindspeed_autoparallel.planner.tuner.links import SIZES, link_samples, operator_samples
from mindspeed_autoparallel.planner.tuner.pricing import Prices, calls_of
from mindspeed_autoparallel.planner.tuner.stages import Modelled, PipelineCost, StepCost, fit_stages, fit_steps
from mindspeed_autoparallel.profiles import MeasuredAt, layer_block
from mindspeed_autoparallel.profiles.calibration_records import PipelineResult
from mindspeed_autoparallel.profiles.device import LinkTier
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.profiles.knowledge.estimate import Coverage, coverage
from mindspeed_autoparallel.profiles.records import DIRECTIONS, BlockTrace, PointResult, TraceResult, json_of
from mindspeed_autoparallel.progress import changes_logged
from mindspeed_autoparallel.runtime.features.auto_tuning.costs import (
    CalibrationResult,
    Missing,
    collectives_to_sample,
    datasheet_optimizer_us_per_byte,
    find_measured,
    is_measurable,
    measured_so_far,
    needed_bytes,
    tiers_or_catalogue,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.figures import (
    PIPELINE_FILES,
    Figures,
    pipelines_of,
    samples_in,
    source_of_today,
    stages_us,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.traces import Traces, measure_task
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchStatus
from mindspeed_autoparallel.runtime.profiling.calibrate.results import (
    MeasurementJournal,
    fingerprint_of,
    read_links,
    read_operators,
)
from mindspeed_autoparallel.runtime.profiling.measure.steps import Pipeline
from mindspeed_autoparallel.runtime.profiling.measure.structure import MIN_LAYERS
from mindspeed_autoparallel.runtime.profiling.measure.task import read_point

MISSING_FILE = "missing_operators.json"
"""Input file of ``mindspeed-autoparallel calibrate``: the missing operators."""
MINIMUM_COVERAGE = 0.95
"""Share of the time of all traced calls that must be measured; the rest is interpolated."""
_LEAST_COVERAGE = 0.5
"""Share below which tuning fails, because a search would rest on guesses."""
_ANCHOR_SHARE = 0.6
"""Share of the device's memory that a layout to be measured whole may need."""

_LOGGER = logging.getLogger(__name__)


class Calibration:
    """Compares the knowledge base with one model's traces, and measures the missing entries."""

    def __init__(
        self,
        request: TuningRequest,
        traces: Traces,
        found: Mapping[MeasuredAt, TraceResult],
        device: Any,
        base: KnowledgeBase,
        sends: str,
    ) -> None:
        """Take ``sends``, one of ``schedule.SENDS``: how the host's interleaved schedule sends."""
        self._request, self._device, self._sends = request, device, sends
        self._traces = {point: result for point, result in found.items() if result.failure is None}
        self._failed = [point for point, result in found.items() if result.failure is not None]
        self._about = fingerprint_of(device)
        self._figures = Figures(
            base=base, device=self._about.device, software=self._about.software, model_key=traces.key
        )
        self._folder = request.work_dir / "measurements" / traces.key
        self._journal = MeasurementJournal(self._folder, self._about.device, self._about.software)
        self._notes: list[str] = []
        self._catalogue = functools.partial(find_measured, "CPU" if device.name == "cpu" else self._about.name)

    def take(self, launches: Launches) -> CalibrationResult:
        """Measure all missing entries in one launch.

        After a failed launch the search continues with the finished entries; the next run measures the rest.
        """
        recovered: list[MeasuredAt] = []
        if self._journal.pending:
            recovered = [point for point in (*self._traces, *self._failed) if self._measured(point) is not None]
            _LOGGER.info("what an earlier launch measured before it was cut off is used")
            self._store(recovered)
            self._journal.commit(finished=False)
        missing = self._missing(recovered)
        if self._traces:
            _LOGGER.info(f"the knowledge base covers {missing.coverage.covered_time_share:.1%} of the traced time")
        else:
            _LOGGER.info("nothing could be traced: layouts are measured whole where the devices can hold them")
        if missing.nothing:
            _LOGGER.info("nothing has to be measured")
            self._journal.commit()
            return self._result(missing.coverage)
        outcome = self._launch(launches, missing)
        finished = outcome.status is LaunchStatus.OK
        self._store(missing.points)
        if finished and missing.pipelines and self._figures.known("message") is None:
            self._figures.keep_pipeline_cost(None)
            self._notes.append("the model could not be run as a pipeline: the host's overhead of messages is left out")
        self._journal.commit(finished=finished)
        after = self._coverage() if missing.operators else missing.coverage
        if after.covered_time_share < _LEAST_COVERAGE:
            raise ProfileError(
                f"after the launch only {after.covered_time_share:.0%} of the operators' time is known, too little to "
                f"search by. How it ended: {outcome.describe()}"
            )
        if not finished:
            self._notes.append(
                f"the measuring launch ended with {outcome.status.value}; what it finished is used, "
                "and the same command measures the rest"
            )
        return self._result(after)

    def _missing(self, recovered: Iterable[MeasuredAt]) -> Missing:
        covered = self._coverage()
        operators = covered.missing if covered.covered_time_share < MINIMUM_COVERAGE else ()
        again = self._journal.unfinished
        anchors = self._anchors() if operators or again or not self._figures.cpu_overhead_is_known else []
        fallback = [point for point in self._failed if is_measurable(self._request, point)]
        done = {*recovered, *(point for point in anchors if again and self._measured(point) is not None)}
        points = tuple(point for point in dict.fromkeys((*anchors, *fallback)) if point not in done)
        pipelines = self._pipelines(anchors) if points or not self._figures.pipelines_are_known else []
        return Missing(
            coverage=covered,
            operators=tuple(operators),
            collectives=collectives_to_sample(self._figures.tiers(), self._request),
            points=points,
            pipelines=tuple(pipelines),
        )

    def _launch(self, launches: Launches, missing: Missing) -> LaunchOutcome:
        request = self._request
        write_json_atomic(
            request.work_dir / MISSING_FILE, {"schema_version": 1, "operators": json_of(missing.coverage.missing)}
        )
        _LOGGER.info(
            f"one launch on {request.num_nodes} x {request.num_processes_per_node} devices: "
            f"{len(missing.operators)} operators, {len(missing.collectives)} collectives, {len(missing.points)} whole "
            f"layouts, {len(missing.pipelines)} pipelines"
        )
        task = measure_task(request, missing.points or tuple(self._traces)[:1], self._folder, *self._traced_layers())
        files = [task.result_file(point) for point in missing.points]
        self._journal.open([*files, *self._folder.glob(PIPELINE_FILES)])
        with changes_logged(measured_so_far(self._folder, len(missing.operators), files)):
            return launches.on_devices(
                "calibrate",
                {
                    "kind": "calibrate",
                    "measure": task.to_json(),
                    "measure_points": bool(missing.points),
                    "operators": json_of(missing.operators),
                    "collectives": list(missing.collectives),
                    "sizes": list(SIZES),
                    "pipelines": [asdict(pipeline) for pipeline in missing.pipelines],
                },
            )

    def _traced_layers(self) -> tuple[int, dict[str, tuple[int, ...]]]:
        """Return the number of traced layers, among which every kind occurs, and the kinds of all layers by stack."""
        modules = [module for trace in self._variants() for module in trace.modules]
        number = max((module.num_layers for module in modules), default=MIN_LAYERS)
        return number, {module.name: module.kinds for module in modules}

    def _variants(self) -> list[BlockTrace]:
        return [trace for result in self._traces.values() for trace in result.variants.values()]

    def _coverage(self) -> Coverage:
        """Return the known share, by time, of the calls of all traced variants."""
        figures = self._figures
        return coverage(figures.base, figures.device, figures.software, calls_of(self._variants()))

    def _result(self, covered: Coverage) -> CalibrationResult:
        """Return costs with the CPU overhead fitted to the blocks that were measured whole."""
        figures, request = self._figures, self._request
        tiers, notes = tiers_or_catalogue(figures.tiers(), request, self._catalogue)
        self._notes += notes
        prices = Prices(
            base=figures.base,
            device=figures.device,
            software=figures.software,
            tiers=tiers,
            devices_per_node=request.devices_per_node,
        )
        asynchronous = self._device.name != "cpu"
        anchors = list(figures.anchors(self._traces, prices))
        fallback = figures.cpu_overhead(asynchronous)
        prices.host = fit_host(anchors, asynchronous=asynchronous, fallback=fallback)
        if anchors:
            figures.keep(per_call=prices.host.per_call_us, scale=prices.host.scale)
        elif self._traces:
            self._notes.append("no block of this model was measured whole: the host's share is that of other models")
        step, pipeline = figures.step_cost(), figures.pipeline_cost()
        if step is None:
            self._notes.append("no whole step was measured on this device: the host's overhead of a step is left out")
        if pipeline is None and request.num_ranks > 1:
            self._notes.append("no pipeline was run on this device: the host's overhead of messages is left out")
        measured = {point: result for point in self._failed if (result := self._measured(point)) is not None}
        return CalibrationResult(
            source="measured",
            device_name=self._about.name,
            software=figures.software,
            prices=prices,
            optimizer_us_per_byte=self._optimizer_us_per_byte(),
            step=step or StepCost(),
            pipeline=pipeline or PipelineCost(),
            coverage=covered,
            measured=measured,
            notes=tuple(self._notes),
        )

    def _optimizer_us_per_byte(self) -> float:
        measured = self._figures.optimizer_us_per_byte()
        return datasheet_optimizer_us_per_byte(self._catalogue()) if measured is None else measured

    def _anchors(self) -> list[MeasuredAt]:
        """Return a few layouts to measure whole, which the measuring devices can hold."""
        limit_bytes = _ANCHOR_SHARE * self._device.total_memory_bytes()
        able = [
            point
            for point, result in self._traces.items()
            if is_measurable(self._request, point) and point.context_size == 1 and needed_bytes(result) < limit_bytes
        ]
        if not able and self._traces:
            self._notes.append("no layout fits the measuring devices whole: operators alone are measured")
        return choose(able) if able else []

    def _store(self, points: Iterable[MeasuredAt]) -> None:
        source = source_of_today()
        samples, failed = operator_samples(read_operators(self._folder).rows, source)
        self._notes += [f"could not be replayed: {reason}" for reason in failed]
        self._figures.record([*link_samples(read_links(self._folder).rows, source), *samples])
        results = {point: self._measured(point) for point in points}
        whole = {point: result for point, result in results.items() if result is not None}
        self._notes += [f"{point.label()} could not be measured whole" for point in results if point not in whole]
        for point, result in whole.items():
            self._figures.keep_point(point, result)
        if (cost := fit_steps(list(whole.values()))) is not None:
            self._figures.keep_step_cost(cost)
        self._store_pipelines()

    def _pipelines(self, anchors: list[MeasuredAt]) -> list[Pipeline]:
        known = [point for point in self._traces if self._block_us(point, layer_block(0), DIRECTIONS[0])]
        dense = [point for point in (*anchors, *known) if point.expert_size == 1]
        return pipelines_of(self._request, dense, self._sends)

    def _store_pipelines(self) -> None:
        link = self._figures.tiers().get("intra" if self._request.num_nodes == 1 else "inter")
        if link is None:
            return
        samples = [
            (sample, self._modelled(sample, link))
            for sample in samples_in(self._folder)
            if self._block_us(sample.at, layer_block(0), DIRECTIONS[0])
        ]
        found = fit_stages(samples)
        if found is not None:
            self._figures.keep_pipeline_cost(found)

    def _modelled(self, sample: PipelineResult, link: LinkTier) -> Modelled:
        (module,) = self._traces[sample.at].plain.modules
        return Modelled(
            stages_us=stages_us(sample, module.kinds, functools.partial(self._block_us, sample.at)),
            message_us=p2p_us(round(module.blocks[layer_block(0)].output_bytes), link),
            step=self._figures.step_cost() or StepCost(),
            optimizer_us_per_byte=self._optimizer_us_per_byte(),
            sends=self._sends if sample.stages.interleaved else "blocking",
        )

    def _block_us(self, point: MeasuredAt, block: str, direction: str) -> float:
        return self._figures.block_us(point, self._request.description.modules[0].name, block, direction)

    def _measured(self, point: MeasuredAt) -> PointResult | None:
        return read_point(measure_task(self._request, (point,), self._folder).result_file(point))
