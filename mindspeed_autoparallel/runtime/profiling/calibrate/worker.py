"""Measurements in one launch of the user's script: collectives, operators, whole layouts, pipelines."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.planner.tuner.links import SIZES
from mindspeed_autoparallel.profiles.calibration_records import LinkRow, OperatorRow
from mindspeed_autoparallel.profiles.device import COLLECTIVES
from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.profiles.records import json_of, record_of
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.megatron.hybrid import cut_pattern, hybrid_pattern, set_pattern
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing
from mindspeed_autoparallel.runtime.profiling.calibrate.replay import replay, sample_collectives
from mindspeed_autoparallel.runtime.profiling.calibrate.results import (
    CALIBRATION_SCHEMA_VERSION,
    LINKS_FILE,
    OPERATORS_FILE,
)
from mindspeed_autoparallel.runtime.profiling.measure import worker
from mindspeed_autoparallel.runtime.profiling.measure.relayout import Built, reinitialize_model_parallel
from mindspeed_autoparallel.runtime.profiling.measure.state import release
from mindspeed_autoparallel.runtime.profiling.measure.steps import Pipeline, time_pipeline
from mindspeed_autoparallel.runtime.profiling.measure.structure import shorten
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask

_SAVE_EVERY_S = 1.0


def prepare(arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    """Handle tasks of kind ``calibrate``."""
    balance_routing()
    worker.prepare(arguments, data["measure"])

    operators = record_of(data["operators"], "operators of this task", list[Operator])
    pipelines = record_of(data["pipelines"], "pipelines of this task", list[Pipeline])

    def take_over(task: MeasureTask, forward_step: Callable[..., Any], config: Any, built: Built) -> None:
        fill(Path(task.result_dir), operators, data["collectives"], data["sizes"])
        if data["measure_points"]:
            built = worker.measure_all(task, forward_step, config, built)
        for pipeline in pipelines:  # last: some models cannot run as a pipeline
            release(built.model, built.optimizer)
            del built  # references to the old groups keep their threads
            built = _cut(pipeline)
            time_pipeline(pipeline, built, forward_step, Path(task.result_dir))

    worker.measuring().take_over = take_over


def sample_links_and_exit(arguments: argparse.Namespace, data: dict[str, object]) -> None:
    """Handle tasks of kind ``links``: sample collectives on all ranks and exit, without building a model."""
    import torch.distributed as distributed

    meet()
    fill(Path(str(data["folder"])), [], list(COLLECTIVES), list(SIZES))
    distributed.destroy_process_group()
    sys.exit(0)


def meet() -> None:
    """Select this process's device and initialize the default process group of its launch."""
    import torch.distributed as distributed

    device = current_device()
    if device.name != "cpu":
        import torch

        getattr(torch, device.name).set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(device.backend)


def fill(folder: Path, operators: list[Operator], collectives: list[str], sizes: list[int]) -> None:
    """Replay ``operators`` on rank 0, then sample ``collectives`` on all ranks.

    The files grow during the run and are complete at every moment, so that a hanging launch leaves its finished
    results.
    """
    import torch.distributed as distributed

    device, rank = current_device(), distributed.get_rank()
    if rank == 0 and operators:
        _keep(folder / OPERATORS_FILE, replay(operators, device))
    if collectives and distributed.get_world_size() > 1:
        rows = sample_collectives(collectives, sizes, device, int(os.environ["LOCAL_WORLD_SIZE"]))
        # Every rank takes part in every sample; rank 0 writes the rows.
        _keep(folder / LINKS_FILE, rows) if rank == 0 else list(rows)
    distributed.barrier()


def _cut(pipeline: Pipeline) -> Built:
    """Build the model again, cut into the stages of ``pipeline``."""
    import torch.distributed as distributed
    from megatron.training import get_args

    arguments, session = get_args(), worker.measuring()
    shorten(arguments, pipeline.num_layers, session.choices_by_layer)
    if pattern := hybrid_pattern(arguments):
        number = pipeline.stages.pipeline_size * pipeline.stages.virtual_size
        set_pattern(arguments, cut_pattern(pattern, [pipeline.num_layers // number] * number))
    return reinitialize_model_parallel(
        session.calls, arguments, pipeline.at, distributed.get_world_size(), pipeline.stages
    )


def _keep(path: Path, rows: Iterable[OperatorRow | LinkRow]) -> None:
    kept: list[OperatorRow | LinkRow] = []
    saved_at = time.monotonic()
    for row in rows:
        kept.append(row)
        if time.monotonic() - saved_at > _SAVE_EVERY_S:
            _write(path, kept)
            saved_at = time.monotonic()
    _write(path, kept)
    print(f"wrote {len(kept)} rows to {path}", flush=True)


def _write(path: Path, rows: list[OperatorRow | LinkRow]) -> None:
    write_json_atomic(path, {"schema_version": CALIBRATION_SCHEMA_VERSION, "rows": [_as_written(row) for row in rows]})


def _as_written(row: OperatorRow | LinkRow) -> dict[str, object]:
    """Return ``row`` in its file's form: without times if it failed, without a reason if it did not."""
    failed = isinstance(row, OperatorRow) and bool(row.reason)
    kept = ("name", "signature", "sizes", "reason")
    return {name: value for name, value in json_of(row).items() if (name in kept if failed else name != "reason")}
