"""Entries of the knowledge base for one model on one device, and the short pipelines that a launch adds to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.planner.tuner.host import Anchor, HostModel
from mindspeed_autoparallel.planner.tuner.links import fitted_tiers, single
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.planner.tuner.stages import PipelineCost, StepCost
from mindspeed_autoparallel.profiles import MeasuredAt, layer_block
from mindspeed_autoparallel.profiles.calibration_records import PipelineResult, Stages
from mindspeed_autoparallel.profiles.device import LinkTier, StageOverhead
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator, Sample, Signature
from mindspeed_autoparallel.profiles.knowledge.signature import OfModel
from mindspeed_autoparallel.profiles.records import DIRECTIONS, PointResult, TraceResult, read_record
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.profiling.measure.steps import Pipeline

PIPELINE_FILES = "pipeline_*.json"
"""Glob pattern of the results of the pipelines that a launch ran."""
_PIPELINE = ("message", "interleaved_message", "stage_first", "stage_inner", "stage_last", "pipeline_step")
_LEAST_US = 1e-3


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Reads and records under the keys of a device, its software and a model's traces."""

    base: KnowledgeBase
    device: str
    software: str
    model_key: str

    def record(self, entries: list[tuple[Operator, Sample]]) -> None:
        """Keep ``entries`` of this device and software."""
        self.base.record(self.device, self.software, entries)

    def tiers(self) -> dict[str, LinkTier]:
        """Return the tiers whose collectives were sampled."""
        return fitted_tiers(self.base, self.device, self.software)

    def block_us(self, point: MeasuredAt, module: str, block: str, direction: str) -> float:
        """Return the time of a block that was measured whole; 0 if it took no time or was not measured."""
        sample = self.base.find(self.device, self.software, self._block(point, module, block, direction))
        return 0.0 if sample is None else sample.median_us

    def keep_point(self, point: MeasuredAt, result: PointResult) -> None:
        """Keep the blocks and the optimizer step of a layout that was measured whole."""
        source = source_of_today()
        entries = [
            (self._block(point, module.name, name, direction), single(block.time_us(direction), source))
            for module in result.modules
            for name, block in module.blocks.items()
            for direction in DIRECTIONS
            if block.time_us(direction) > 0
        ]
        size = result.optimizer.parameter_bytes
        if size > 0:
            step = Operator(name="optimizer.step", signature=Signature(OfModel(self.model_key)), sizes=(size,))
            entries.append((step, single(result.optimizer.step_us, source)))
        self.record(entries)

    def anchors(self, traces: Mapping[MeasuredAt, TraceResult], prices: Prices) -> Iterator[Anchor]:
        """Yield the blocks of ``traces`` that were measured whole, with the sums of their parts."""
        for point, result in traces.items():
            for module in result.plain.modules:
                for block in module.blocks:
                    for direction in DIRECTIONS:
                        measured_us = self.block_us(point, module.name, block, direction)
                        if measured_us:
                            sums = prices.sums(result.plain, module, block, direction)
                            yield Anchor(block=block, direction=direction, at=point, sums=sums, measured_us=measured_us)

    def optimizer_us_per_byte(self) -> float | None:
        """Return the time per byte of parameters that a rank updates; ``None`` if no step was measured."""
        steps = self.base.of_name(self.device, self.software, "optimizer.step")
        if not steps:
            return None
        return sum(sample.median_us for _, sample in steps) / sum(operator.sizes[0] for operator, _ in steps)

    def step_cost(self) -> StepCost | None:
        """Return the host's overhead of microbatches and steps; ``None`` if no whole step was measured."""
        per_microbatch, per_step = self.known("per_microbatch"), self.known("per_step")
        if per_microbatch is None or per_step is None:
            return None
        return StepCost(per_microbatch_us=per_microbatch, per_step_us=per_step)

    def keep_step_cost(self, cost: StepCost) -> None:
        """Keep the host's overhead of microbatches and steps."""
        self.keep(per_microbatch=cost.per_microbatch_us, per_step=cost.per_step_us)

    def pipeline_cost(self) -> PipelineCost | None:
        """Return the overhead of cutting a model into stages; ``None`` if no pipeline was run."""
        found = {name: self.known(name) for name in _PIPELINE}
        if found["message"] is None:
            return None
        message, first, inner, last, step = (
            found[name] or 0.0 for name in ("message", "stage_first", "stage_inner", "stage_last", "pipeline_step")
        )
        return PipelineCost(
            message_us=message,
            interleaved_message_us=found["interleaved_message"],
            step_us=step,
            stage=StageOverhead(first_us=first, inner_us=inner, last_us=last),
        )

    def keep_pipeline_cost(self, cost: PipelineCost | None) -> None:
        """Keep the overhead of cutting the model into stages; ``None``: no pipeline could be run."""
        if cost is None:
            self.keep(no_pipeline=1.0)
            return
        interleaved = cost.interleaved_message_us
        self.keep(
            message=cost.message_us,
            stage_first=cost.stage.first_us,
            stage_inner=cost.stage.inner_us,
            stage_last=cost.stage.last_us,
            pipeline_step=cost.step_us,
            **({} if interleaved is None else {"interleaved_message": interleaved}),
        )

    @property
    def pipelines_are_known(self) -> bool:
        """Return whether no pipeline has to be run: that of some model was, or that of this model could not
        be."""
        tried = self.base.find(self.device, self.software, self._host("no_pipeline"))
        return tried is not None or self.known("message") is not None

    @property
    def cpu_overhead_is_known(self) -> bool:
        """Return whether the overhead of a call on top of its kernel was fitted to some model on this device."""
        return bool(self.base.of_name(self.device, self.software, "host.per_call"))

    def cpu_overhead(self, asynchronous: bool) -> HostModel | None:
        """Return the overhead of a call on top of its kernel, by this model's own blocks or by those of others."""
        per_call, scale = self.known("per_call"), self.known("scale")
        if per_call is None or scale is None:
            return None
        return HostModel(scale=scale, per_call_us=per_call, asynchronous=asynchronous)

    def known(self, name: str) -> float | None:
        """Return a figure of the host: this model's own, else the median of other models'."""
        own = self.base.find(self.device, self.software, self._host(name))
        if own is not None:
            return own.median_us
        rows = self.base.of_name(self.device, self.software, f"host.{name}")
        return sorted(sample.median_us for _, sample in rows)[len(rows) // 2] if rows else None

    def keep(self, **values: float) -> None:
        """Keep figures of the host as this model's."""
        self.record([(self._host(name), single(max(value, _LEAST_US), "fit")) for name, value in values.items()])

    def _block(self, point: MeasuredAt, module: str, block: str, direction: str) -> Operator:
        signature = Signature(OfModel(self.model_key, point.label()))
        return Operator(name=f"block.{module}.{block}.{direction}", signature=signature, sizes=())

    def _host(self, name: str) -> Operator:
        return Operator(name=f"host.{name}", signature=Signature(OfModel(self.model_key)), sizes=())


def source_of_today() -> str:
    """Return the source under which the entries of this run are kept."""
    return f"auto-tuning {time.strftime('%Y-%m-%d', time.gmtime())}"


_STAGES, _NUM_CHUNKS, _NUM_MICROBATCHES = 2, 2, 4
"""The smallest sizes with messages, an inner stage and a steady phase."""


def pipelines_of(request: TuningRequest, points: Iterable[MeasuredAt], sends: str) -> list[Pipeline]:
    """Return the plain pipeline and the interleaved one of the first of ``points`` that the measuring devices can hold.

    ``sends``: how the host's interleaved schedule sends; Megatron runs it on two ranks only with overlap.
    """
    world = request.num_measuring
    point = next((at for at in points if world % (at.tensor_size * at.context_size * _STAGES) == 0), None)
    if point is None or request.num_layers < _STAGES:
        return []
    chunks = [1]
    if request.num_layers >= _STAGES * _NUM_CHUNKS and sends != "blocking":
        chunks.append(_NUM_CHUNKS)
    return [
        Pipeline(
            at=point,
            num_layers=_STAGES * max(chunks),
            stages=Stages(pipeline_size=_STAGES, virtual_size=number, num_microbatches=_NUM_MICROBATCHES),
        )
        for number in chunks
    ]


def samples_in(folder: Path) -> list[PipelineResult]:
    """Return the results that the pipelines of a launch wrote."""
    return [read_record(path, "times of a pipeline", PipelineResult) for path in sorted(folder.glob(PIPELINE_FILES))]


def stages_us(sample: PipelineResult, kinds: Sequence[int], block_us: Callable[[str, str], float]) -> list[float]:
    """Return the time of each virtual stage's blocks, forward plus backward, in microseconds.

    ``kinds``: the kind of every layer of the model; ``block_us``: the time of a block in a direction.
    """
    number = sample.stages.pipeline_size * sample.stages.virtual_size
    layers = [layer_block(kind) for kind in kinds[: sample.num_layers]]
    share = len(layers) // number
    held = [layers[share * stage : share * (stage + 1)] for stage in range(number)]
    held[0].insert(0, "pre")
    held[-1].append("post")
    return [sum(block_us(block, direction) for block in blocks for direction in DIRECTIONS) for blocks in held]
