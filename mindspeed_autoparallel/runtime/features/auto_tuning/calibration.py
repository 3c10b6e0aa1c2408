"""What the knowledge base lacks for a model, the one launch that measures it, and what is read from it afterwards."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import p2p_us
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.planner.tuner.anchors import choose
from mindspeed_autoparallel.planner.tuner.host import Anchor, HostModel, fit_host
from mindspeed_autoparallel.planner.tuner.links import SIZES, TIERS, catalogue_tier, fitted_tiers, link_samples
from mindspeed_autoparallel.planner.tuner.pricing import DIRECTIONS, Prices, calls_of
from mindspeed_autoparallel.planner.tuner.samples import operator_samples, rows_of, single
from mindspeed_autoparallel.planner.tuner.stages import Modelled, PipelineCost, fit_stages
from mindspeed_autoparallel.planner.tuner.steps import StepCost, fit_steps
from mindspeed_autoparallel.profiles import MeasuredAt, layer_block
from mindspeed_autoparallel.profiles.device import COLLECTIVES, LinkTier, StageOverhead
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator, Sample
from mindspeed_autoparallel.profiles.knowledge.estimate import Coverage, coverage
from mindspeed_autoparallel.progress import changes_logged
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.pipelines import files_in, pipelines_of, samples_in, stages_us
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.trace_store import (
    PLAIN,
    Traces,
    measure_task,
    num_written,
    variant_name,
)
from mindspeed_autoparallel.runtime.launch import LaunchStatus
from mindspeed_autoparallel.runtime.profiling.calibrate.fingerprint import fingerprint_of
from mindspeed_autoparallel.runtime.profiling.calibrate.journal import Unfinished
from mindspeed_autoparallel.runtime.profiling.calibrate.worker import LINKS_FILE, OPERATORS_FILE
from mindspeed_autoparallel.runtime.profiling.measure.layer_kinds import MIN_LAYERS
from mindspeed_autoparallel.runtime.profiling.measure.pipelines import Pipeline

MISSING_FILE = "missing_operators.json"
"""What ``mindspeed-autoparallel calibrate`` takes."""
MINIMUM_COVERAGE = 0.95
"""Share of the time of all traced calls that must be measured; the rest is interpolated."""
_LEAST_COVERAGE = 0.5
"""Below this a search would rest on guesses."""
_ROOM = 0.6
"""Share of the device that a layout measured whole may take."""
_PIPELINE_FIGURES = ("message", "interleaved_message", "stage_first", "stage_inner", "stage_last", "pipeline_step")
"""Of the host, beside those of blocks and steps."""
_STATE_BYTES = 20
"""Per parameter, with gradients, optimizer and copies: only to leave out what will not fit."""

_LOGGER = logging.getLogger(__name__)

Results = Mapping[MeasuredAt, dict[str, Any]]


class Calibration:
    """The knowledge base beside one model's traces."""

    def __init__(
        self, request: TuningRequest, traces: Traces, found: Results, device: Any, base: KnowledgeBase, sends: str
    ) -> None:
        """``sends``: how the host's interleaved schedule treats its messages (``schedule.SENDS``)."""
        self.request, self.traces, self.base, self.device = request, traces, base, device
        self.found = {point: result for point, result in found.items() if result["status"] == "ok"}
        self.failed = [point for point, result in found.items() if result["status"] != "ok"]
        about = fingerprint_of(device)
        self.device_name, self.device_key, self.software_key = about.name, about.device, about.software
        self.sends = sends
        self.folder = request.work_dir / "measurements" / traces.key
        self.unfinished = Unfinished(self.folder, self.device_key, self.software_key)
        self.notes: list[str] = []

    def coverage(self) -> Coverage:
        """Of all calls of all traced variants, by time."""
        variants = [
            variant
            for result in self.found.values()
            for variant in result["variants"].values()
            if variant["status"] == "ok"
        ]
        return coverage(self.base, self.device_key, self.software_key, calls_of(variants))

    def take(self, launches: Launches) -> Coverage:
        """Launch once for whatever is missing; a launch that fails leaves what it finished, and the search goes on."""
        recovered = self._recovered()
        if self.unfinished.is_there:
            _LOGGER.info("what an earlier launch measured before it was cut off is used")
            self._store(recovered)
            self.unfinished.end()
        covered = self.coverage()
        operators = list(covered.missing) if covered.covered_time_share < MINIMUM_COVERAGE else []
        collectives = self._missing_collectives()
        anchors = self._anchors() if operators or not self._host_is_known() else []
        fallback = [point for point in self.failed if self._is_measurable(point)]
        points = tuple(point for point in dict.fromkeys((*anchors, *fallback)) if point not in recovered)
        pipelines = self._pipelines(anchors) if points or not self._pipelines_are_known() else []
        if self.found:
            _LOGGER.info(f"the knowledge base covers {covered.covered_time_share:.1%} of the traced time")
        else:
            _LOGGER.info("nothing could be traced: layouts are measured whole where the devices can hold them")
        if not operators and not collectives and not points and not pipelines:
            _LOGGER.info("nothing has to be measured")
            return covered
        write_json_atomic(
            self.request.work_dir / MISSING_FILE,
            {"schema_version": 1, "operators": [asdict(operator) for operator in covered.missing]},
        )
        _LOGGER.info(
            f"one launch on {self.request.num_nodes} x {self.request.num_processes_per_node} devices: {len(operators)} "
            f"operators, {len(collectives)} collectives, {len(points)} whole layouts, {len(pipelines)} pipelines"
        )
        task = measure_task(self.request, points or tuple(self.found)[:1], self.folder, *self._traced_layers())
        layouts = [task.result_file(point) for point in points]
        self.unfinished.begin([*layouts, *files_in(self.folder)])
        with changes_logged(self._progress(len(operators), layouts)):
            outcome = launches.on_devices(
                "calibrate",
                {
                    "kind": "calibrate",
                    "measure": task.to_json(),
                    "measure_points": bool(points),
                    "operators": [asdict(operator) for operator in operators],
                    "collectives": collectives,
                    "sizes": list(SIZES),
                    "pipelines": [asdict(pipeline) for pipeline in pipelines],
                },
            )
        self._store(points)
        if pipelines and self._known("message") is None:
            self._keep(no_pipeline=1.0)
            self.notes.append("the model could not be run as a pipeline: what the host adds to messages is left out")
        self.unfinished.end()
        after = self.coverage() if operators else covered
        if after.covered_time_share < _LEAST_COVERAGE:
            raise ProfileError(
                f"after the launch only {after.covered_time_share:.0%} of the operators' time is known, too little to "
                f"search by. How it ended: {outcome.describe()}"
            )
        if outcome.status is not LaunchStatus.OK:
            self.notes.append(f"the measuring launch ended with {outcome.status.value}; what it finished is used")
        return after

    def _progress(self, num_operators: int, layouts: list[Path]) -> Callable[[], str]:
        rows, started = self.folder / OPERATORS_FILE, time.time()

        def describe() -> str:
            measured = len(rows_of(rows)) if num_written([rows], started) else 0
            return (
                f"measured {measured} of {num_operators} operators, {num_written(layouts, started)} of {len(layouts)} "
                "whole layouts"
            )

        return describe

    def _recovered(self) -> tuple[MeasuredAt, ...]:
        """Layouts that a launch measured whole before it was cut off."""
        if not self.unfinished.is_there:
            return ()
        return tuple(point for point in (*self.found, *self.failed) if self._result(point) is not None)

    def _traced_layers(self) -> tuple[int, dict[str, list[int]]]:
        """As many as were traced, for they show every kind of layers; and the kinds of all layers, by stack."""
        variants = [variant for result in self.found.values() for variant in result["variants"].values()]
        modules = [module for variant in variants for module in variant.get("modules", ())]
        number = max((module["num_layers"] for module in modules), default=MIN_LAYERS)
        return number, {module["name"]: module["kinds"] for module in modules}

    def measured(self) -> dict[MeasuredAt, dict[str, Any]]:
        """Points that could not be traced and were measured instead."""
        return {point: result for point in self.failed if (result := self._result(point)) is not None}

    def prices(self) -> Prices:
        """Prices for the traces, with the host fitted to the blocks that were measured whole."""
        prices = Prices(
            base=self.base,
            device=self.device_key,
            software=self.software_key,
            tiers=self.tiers(),
            devices_per_node=self.request.devices_per_node,
        )
        asynchronous = self.device.name != "cpu"
        anchors = list(self._anchors_of(prices))
        prices.host = fit_host(anchors, asynchronous=asynchronous, fallback=self._known_host(asynchronous))
        if anchors:
            self._keep(per_call=prices.host.per_call_us, scale=prices.host.scale)
        elif self.found:
            self.notes.append("no block of this model was measured whole: the host's share is that of other models")
        return prices

    def tiers(self) -> dict[str, LinkTier]:
        """Both tiers: sampled, or what is nearest to it, and a note."""
        found = fitted_tiers(self.base, self.device_key, self.software_key)
        places = (("inside a node", "--nproc-per-node 2 or more"), ("between nodes", "--nnodes 2"))
        for tier, (where, how) in zip(TIERS, places, strict=True):
            if tier not in found:
                found[tier] = catalogue_tier(self._catalogue(), tier, self.request.devices_per_node)
                if tier == "intra" or self.request.num_ranks > self.request.devices_per_node:
                    used = f"datasheet figures are used; {how} samples them"
                    self.notes.append(f"links {where} were never sampled here: {used}")
        return found

    def optimizer_us_per_byte(self) -> float:
        """Of parameters that a rank updates; from the datasheet where no step was measured."""
        steps = self.base.of_name(self.device_key, self.software_key, "optimizer.step")
        if steps:
            return sum(sample.median_us for _, sample in steps) / sum(operator.sizes[0] for operator, _ in steps)
        device = self._catalogue()
        efficiency = next(iter(device.efficiencies.values()))
        # About 30 bytes are moved for the two bytes of a parameter.
        return 15.0 / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction)

    def step_cost(self) -> StepCost:
        """What the host adds to every microbatch and step, as far as whole steps were measured on this device."""
        per_microbatch, per_step = self._known("per_microbatch"), self._known("per_step")
        if per_microbatch is None or per_step is None:
            self.notes.append("no whole step was measured on this device: what the host adds to a step is left out")
            return StepCost()
        return StepCost(per_microbatch_us=per_microbatch, per_step_us=per_step)

    def pipeline_cost(self) -> PipelineCost:
        """What cutting the model into stages adds, as far as pipelines were run on this device."""
        found = {name: self._known(name) for name in _PIPELINE_FIGURES}
        if found["message"] is None:
            if self.request.num_ranks > 1:
                self.notes.append("no pipeline was run on this device: what the host adds to messages is left out")
            return PipelineCost()
        first, inner, last, step, message = (
            found[name] or 0.0 for name in ("stage_first", "stage_inner", "stage_last", "pipeline_step", "message")
        )
        return PipelineCost(
            message_us=message,
            interleaved_message_us=found["interleaved_message"],
            step_us=step,
            stage=StageOverhead(first_us=first, inner_us=inner, last_us=last),
        )

    def _catalogue(self) -> Device:
        try:
            return find_device(self.device_name if self.device.name != "cpu" else "CPU")
        except ConfigError as error:
            raise ConfigError(
                f"{error} It is needed for links that were not sampled: measure on two nodes with two devices each."
            ) from error

    def _missing_collectives(self) -> list[str]:
        wanted = []
        if self.request.num_processes_per_node > 1:
            wanted.append("intra")
        if self.request.num_nodes > 1:
            wanted.append("inter")
        known = fitted_tiers(self.base, self.device_key, self.software_key)
        kinds = list(COLLECTIVES)
        return kinds if any(tier not in known or set(known[tier].operations) != set(kinds) for tier in wanted) else []

    def _is_measurable(self, point: MeasuredAt) -> bool:
        world = self.request.num_measuring
        shards = point.tensor_size * point.context_size
        return (
            world % shards == 0
            and world // point.tensor_size % point.expert_size == 0
            and (point.tensor_size <= self.request.num_processes_per_node)
        )

    def _anchors(self) -> list[MeasuredAt]:
        """A few layouts that the measuring devices can hold."""
        room = _ROOM * self.device.total_memory_bytes()
        able = [
            point
            for point, result in self.found.items()
            if self._is_measurable(point) and point.context_size == 1 and _needed_bytes(result) < room
        ]
        if not able:
            if self.found:
                self.notes.append("no layout fits the measuring devices whole: operators alone are measured")
            return []
        return choose(able)

    def _store(self, points: tuple[MeasuredAt, ...]) -> None:
        source = f"auto-tuning {time.strftime('%Y-%m-%d', time.gmtime())}"
        entries: list[tuple[Operator, Sample]] = link_samples(rows_of(self.folder / LINKS_FILE), source)
        measured, failed = operator_samples(rows_of(self.folder / OPERATORS_FILE), source)
        entries += measured
        self.notes += [f"could not be replayed: {reason}" for reason in failed]
        for point in points:
            result = self._result(point)
            if result is None:
                self.notes.append(f"{point.label()} could not be measured whole")
                continue
            for module in result["modules"]:
                for block, costs in module["blocks"].items():
                    for direction in DIRECTIONS:
                        if (time_us := costs[f"{direction}_us"]) > 0:
                            operator = self._block_operator(point, module["name"], block, direction)
                            entries.append((operator, single(time_us, source)))
            optimizer = result["optimizer"]
            if optimizer["parameter_bytes"] > 0:
                step = Operator(name="optimizer.step", signature=self.traces.key, sizes=(optimizer["parameter_bytes"],))
                entries.append((step, single(optimizer["step_us"], source)))
        self.base.record(self.device_key, self.software_key, entries)
        cost = fit_steps([result for point in points if (result := self._result(point)) is not None])
        if cost is not None:
            self._keep(per_microbatch=cost.per_microbatch_us, per_step=cost.per_step_us)
        self._store_pipelines()

    def _pipelines(self, anchors: list[MeasuredAt]) -> list[Pipeline]:
        known = [point for point in self.found if self._block_us(point, layer_block(0), DIRECTIONS[0])]
        dense = [point for point in (*anchors, *known) if point.expert_size == 1]
        return pipelines_of(self.request, dense, self.sends)

    def _pipelines_are_known(self) -> bool:
        """Whether there is nothing to learn from a launch: some model's were run, or this one's could not be."""
        tried = self.base.find(self.device_key, self.software_key, self._host_operator("no_pipeline"))
        return tried is not None or self._known("message") is not None

    def _store_pipelines(self) -> None:
        tiers = fitted_tiers(self.base, self.device_key, self.software_key)
        link = tiers.get("intra" if self.request.num_nodes == 1 else "inter")
        if link is None:
            return
        samples = []
        for sample in samples_in(self.folder):
            point, chunks = MeasuredAt(**sample["at"]), sample["stages"]["virtual_size"]
            (module,) = self.found[point]["variants"][variant_name("", PLAIN)]["modules"]
            if not self._block_us(point, layer_block(0), DIRECTIONS[0]):
                continue
            blocks_us = stages_us(sample, module["kinds"], functools.partial(self._block_us, point))
            message_bytes = round(module["blocks"][layer_block(0)]["output_bytes"])
            samples.append(
                (
                    sample,
                    Modelled(
                        stages_us=blocks_us,
                        message_us=p2p_us(message_bytes, link),
                        step=self.step_cost(),
                        optimizer_us_per_byte=self.optimizer_us_per_byte(),
                        sends=self.sends if chunks > 1 else "blocking",
                    ),
                )
            )
        found = fit_stages(samples)
        if found is not None:
            stage = found.stage
            interleaved = found.interleaved_message_us
            self._keep(
                message=found.message_us,
                stage_first=stage.first_us,
                stage_inner=stage.inner_us,
                stage_last=stage.last_us,
                pipeline_step=found.step_us,
                **({} if interleaved is None else {"interleaved_message": interleaved}),
            )

    def _block_us(self, point: MeasuredAt, block: str, direction: str) -> float:
        """As it was measured whole; 0 where that took no time, or was not done."""
        name = self.request.description.modules[0].name
        operator = self._block_operator(point, name, block, direction)
        sample = self.base.find(self.device_key, self.software_key, operator)
        return 0.0 if sample is None else sample.median_us

    def _result(self, point: MeasuredAt) -> dict[str, Any] | None:
        file = measure_task(self.request, (point,), self.folder).result_file(point)
        if not file.exists():
            return None
        result: dict[str, Any] = read_json(file, "measurement")
        return result if result["status"] == "ok" else None

    def _block_operator(self, point: MeasuredAt, module: str, block: str, direction: str) -> Operator:
        signature = json.dumps([self.traces.key, point.label()], separators=(",", ":"))
        return Operator(name=f"block.{module}.{block}.{direction}", signature=signature, sizes=())

    def _anchors_of(self, prices: Prices) -> Any:
        for point, result in self.found.items():
            trace = result["variants"][variant_name("", PLAIN)]
            for module in trace["modules"]:
                for block in module["blocks"]:
                    for direction in DIRECTIONS:
                        operator = self._block_operator(point, module["name"], block, direction)
                        sample = self.base.find(self.device_key, self.software_key, operator)
                        if sample is not None:
                            sums = prices.sums(trace, module, block, direction)
                            yield Anchor(
                                block=block, direction=direction, at=point, sums=sums, measured_us=sample.median_us
                            )

    def _host_is_known(self) -> bool:
        return bool(self.base.of_name(self.device_key, self.software_key, "host.per_call"))

    def _known_host(self, asynchronous: bool) -> HostModel | None:
        per_call, scale = self._known("per_call"), self._known("scale")
        if per_call is None or scale is None:
            return None
        return HostModel(scale=scale, per_call_us=per_call, asynchronous=asynchronous)

    def _known(self, name: str) -> float | None:
        """A figure of the host: this model's own, else the middle of other models'."""
        own = self.base.find(self.device_key, self.software_key, self._host_operator(name))
        if own is not None:
            return own.median_us
        rows = self.base.of_name(self.device_key, self.software_key, f"host.{name}")
        return sorted(sample.median_us for _, sample in rows)[len(rows) // 2] if rows else None

    def _keep(self, **values: float) -> None:
        entries = [(self._host_operator(name), single(max(value, 1e-3), "fit")) for name, value in values.items()]
        self.base.record(self.device_key, self.software_key, entries)

    def _host_operator(self, name: str) -> Operator:
        return Operator(name=f"host.{name}", signature=self.traces.key, sizes=())


def _needed_bytes(result: dict[str, Any]) -> float:
    trace = next(iter(result["variants"].values()))
    parameters = saved = 0
    for module in trace["modules"]:
        for block in module["blocks"].values():
            parameters += sum(kind["num_parameters"] for kind in block["parameters"].values())
            saved += block["saved_bytes"] + block["backward_peak_bytes"]
    return float(2 * (parameters * _STATE_BYTES + saved))
