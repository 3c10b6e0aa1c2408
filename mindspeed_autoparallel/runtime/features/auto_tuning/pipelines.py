"""Which short pipelines the measuring launch runs, and what is read from them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mindspeed_autoparallel.profiles import MeasuredAt, layer_block
from mindspeed_autoparallel.profiles.calibration_records import PipelineResult, Stages
from mindspeed_autoparallel.profiles.records import DIRECTIONS, read_record
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.profiling.measure.pipelines import Pipeline

_SIZE, _NUM_CHUNKS, _NUM_MICROBATCHES = 2, 2, 4
"""The least that has messages, an inner stage, and a steady phase."""


def pipelines_of(request: TuningRequest, points: Iterable[MeasuredAt], sends: str) -> list[Pipeline]:
    """Return the plain pipeline and the interleaved one of the first of ``points`` that the measuring devices can hold.

    ``sends``: how the host's interleaved schedule treats its messages; Megatron runs it on two ranks only with overlap.
    """
    world = request.num_measuring
    point = next((at for at in points if world % (at.tensor_size * at.context_size * _SIZE) == 0), None)
    if point is None or request.num_layers < _SIZE:
        return []
    chunks = [1]
    if request.num_layers >= _SIZE * _NUM_CHUNKS and sends != "blocking":
        chunks.append(_NUM_CHUNKS)
    return [
        Pipeline(
            at=point,
            num_layers=_SIZE * max(chunks),
            stages=Stages(pipeline_size=_SIZE, virtual_size=number, num_microbatches=_NUM_MICROBATCHES),
        )
        for number in chunks
    ]


def files_in(folder: Path) -> list[Path]:
    """Return what the pipelines of a launch wrote."""
    return sorted(folder.glob("pipeline_*.json"))


def samples_in(folder: Path) -> list[PipelineResult]:
    """Return their content."""
    return [read_record(path, "times of a pipeline", PipelineResult) for path in files_in(folder)]


def stages_us(sample: PipelineResult, kinds: Sequence[int], block_us: Callable[[str, str], float]) -> list[float]:
    """Return by virtual stage, forward and backward of its blocks.

    ``kinds``: of every layer of the model; ``block_us``: of a block and a direction.
    """
    number = sample.stages.pipeline_size * sample.stages.virtual_size
    layers = [layer_block(kind) for kind in kinds[: sample.num_layers]]
    share = len(layers) // number
    held = [layers[share * stage : share * (stage + 1)] for stage in range(number)]
    held[0].insert(0, "pre")
    held[-1].append("post")
    return [sum(block_us(block, direction) for block in blocks for direction in DIRECTIONS) for blocks in held]
