"""Which short pipelines the measuring launch runs, and what is read from them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.planner.tuner.pricing import DIRECTIONS
from mindspeed_autoparallel.profiles import MeasuredAt, layer_block
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.profiling.measure.pipelines import Pipeline
from mindspeed_autoparallel.runtime.profiling.measure.relayout import Stages

_SIZE, _NUM_CHUNKS, _NUM_MICROBATCHES = 2, 2, 4
"""The least that has messages, an inner stage, and a steady phase."""


def pipelines_of(request: TuningRequest, points: Iterable[MeasuredAt], sends: str) -> list[Pipeline]:
    """The plain pipeline and the interleaved one of the first of ``points`` that the measuring devices can hold.

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
    """What the pipelines of a launch wrote."""
    return sorted(folder.glob("pipeline_*.json"))


def samples_in(folder: Path) -> list[dict[str, Any]]:
    """Their content."""
    return [read_json(path, "times of a pipeline") for path in files_in(folder)]


def stages_us(sample: Mapping[str, Any], kinds: Sequence[int], block_us: Callable[[str, str], float]) -> list[float]:
    """By virtual stage, forward and backward of its blocks.

    ``kinds``: of every layer of the model; ``block_us``: of a block and a direction.
    """
    number = sample["stages"]["pipeline_size"] * sample["stages"]["virtual_size"]
    layers = [layer_block(kind) for kind in kinds[: sample["num_layers"]]]
    share = len(layers) // number
    held = [layers[share * stage : share * (stage + 1)] for stage in range(number)]
    held[0].insert(0, "pre")
    held[-1].append("post")
    return [sum(block_us(block, direction) for block in blocks for direction in DIRECTIONS) for blocks in held]
