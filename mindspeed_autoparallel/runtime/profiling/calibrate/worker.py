"""What runs on the devices, in one launch of the user's script: collectives, operators, whole layouts, pipelines."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.runtime.profiling.calibrate.replay import replay, sample_collectives
from mindspeed_autoparallel.runtime.profiling.measure import worker
from mindspeed_autoparallel.runtime.profiling.measure.layer_kinds import shorten
from mindspeed_autoparallel.runtime.profiling.measure.pipelines import Pipeline, time_pipeline
from mindspeed_autoparallel.runtime.profiling.measure.relayout import Built, rebuild
from mindspeed_autoparallel.runtime.profiling.measure.state import release
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask
from mindspeed_autoparallel.runtime.profiling.trace.balanced_routing import balance_routing

CALIBRATION_SCHEMA_VERSION = 1
LINKS_FILE, OPERATORS_FILE = "links.json", "operators.json"
_SAVE_EVERY_S = 1.0


def prepare(arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    """Handler of tasks of kind ``calibrate``."""
    balance_routing()
    worker.prepare(arguments, data["measure"])

    def take_over(task: MeasureTask, forward_step: Callable[..., Any], config: Any, built: Built) -> None:
        fill(Path(task.result_dir), data["operators"], data["collectives"], data["sizes"])
        if data["measure_points"]:
            built = worker.measure_all(task, forward_step, config, built)
        for pipeline in map(Pipeline.from_json, data["pipelines"]):  # last: not every model may run so
            release(built.model, built.optimizer)
            del built  # what refers to the old groups keeps their threads
            built = _cut(pipeline)
            time_pipeline(pipeline, built, forward_step, Path(task.result_dir))

    worker.measuring().take_over = take_over


def fill(folder: Path, operators: list[dict[str, Any]], collectives: list[str], sizes: list[int]) -> None:
    """Replay ``operators`` on rank 0, then sample ``collectives`` on all ranks.

    The files grow while that goes on, whole at every moment, so that a launch that hangs leaves what it finished.
    """
    import torch.distributed as distributed

    from mindspeed_autoparallel.runtime.devices import current_device

    device, rank = current_device(), distributed.get_rank()
    if rank == 0 and operators:
        wanted = [
            Operator(name=item["name"], signature=item["signature"], sizes=tuple(item["sizes"])) for item in operators
        ]
        _keep(folder / OPERATORS_FILE, replay(wanted, device))
    if collectives and distributed.get_world_size() > 1:
        rows = sample_collectives(collectives, sizes, device, int(os.environ["LOCAL_WORLD_SIZE"]))
        # Every rank takes part in every sample; the first one writes them down.
        _keep(folder / LINKS_FILE, rows) if rank == 0 else list(rows)
    distributed.barrier()


def _cut(pipeline: Pipeline) -> Built:
    """The model in stages, in the place of what was built before."""
    import torch.distributed as distributed
    from megatron.training import get_args

    arguments, session = get_args(), worker.measuring()
    shorten(arguments, pipeline.num_layers, session.choices_by_layer)
    return rebuild(session.calls, arguments, pipeline.at, distributed.get_world_size(), pipeline.stages)


def _keep(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    kept: list[dict[str, Any]] = []
    saved_at = time.monotonic()
    for row in rows:
        kept.append(row)
        if time.monotonic() - saved_at > _SAVE_EVERY_S:
            _write(path, kept)
            saved_at = time.monotonic()
    _write(path, kept)
    print(f"wrote {len(kept)} rows to {path}", flush=True)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_json_atomic(path, {"schema_version": CALIBRATION_SCHEMA_VERSION, "rows": rows})
