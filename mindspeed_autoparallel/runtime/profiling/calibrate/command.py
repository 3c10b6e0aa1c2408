"""``mindspeed-autoparallel calibrate``: operators and collectives measured without a training script, in one launch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, LaunchError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.planner.tuner.links import SIZES, link_samples, operator_samples
from mindspeed_autoparallel.profiles.device import COLLECTIVES
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator
from mindspeed_autoparallel.profiles.records import record_of
from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE
from mindspeed_autoparallel.runtime.profiling.calibrate.results import (
    Fingerprint,
    fingerprint_of,
    read_links,
    read_operators,
)
from mindspeed_autoparallel.runtime.profiling.calibrate.worker import fill, meet

_FINGERPRINT_FILE = "device.json"


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Result of ``calibrate``: samples added for a device and its software; ``failed``: a line per failed operator."""

    device: str
    software: str
    num_operators: int
    num_collectives: int
    failed: Sequence[str]
    seconds: float


def calibrate(base: KnowledgeBase, operators: Sequence[Any], num_processes: int, timeout_s: float) -> Calibrated:
    """Measure ``operators`` and the collectives of ``num_processes`` on this node, and record them in ``base``.

    Raises ``ConfigError`` for a malformed operator, and ``LaunchError`` if the launch fails or exceeds ``timeout_s``;
    results that exist by then are recorded, too.
    """
    for index, item in enumerate(operators):
        if not isinstance(item, dict) or not {"name", "signature", "sizes"} <= set(item):
            raise ConfigError(f"operator {index} must be an object with name, signature and sizes.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="calibrate-") as scratch:
        folder = Path(scratch)
        spec = LaunchSpec(
            launch_id="calibrate-1",
            argv=("-m", __name__),
            task={"folder": str(folder), "operators": list(operators)},
            timeout_s=timeout_s,
        )
        outcome = run_local_processes(spec, LocalRanks(num_processes=num_processes), log_dir=folder / "logs")
        measured, failed = operator_samples(read_operators(folder).rows, "calibrate")
        links = link_samples(read_links(folder).rows, "calibrate")
        if measured or links:
            about = Fingerprint(**read_json(folder / _FINGERPRINT_FILE, "device"))
            base.record(about.device, about.software, [*measured, *links])
        if outcome.status is not LaunchStatus.OK:
            raise LaunchError(
                f"the measuring launch failed; {len(measured)} operators and {len(links)} samples of collectives that "
                f"it had finished are in {base.path}: {outcome.describe(log_is_kept=False)}"
            )
        about = Fingerprint(**read_json(folder / _FINGERPRINT_FILE, "device"))
    return Calibrated(
        device=about.device,
        software=about.software,
        num_operators=len(measured),
        num_collectives=len(links),
        failed=failed,
        seconds=time.monotonic() - started,
    )


def main() -> int:
    """Run one of the launch's processes."""
    import torch.distributed as distributed

    from mindspeed_autoparallel.files import write_json_atomic
    from mindspeed_autoparallel.runtime.devices.selection import current_device, prepare_for_megatron

    prepare_for_megatron()
    task = json.loads(Path(os.environ[TASK_VARIABLE]).read_text(encoding="utf-8"))
    meet()
    folder = Path(task["folder"])
    if distributed.get_rank() == 0:
        write_json_atomic(folder / _FINGERPRINT_FILE, vars(fingerprint_of(current_device())))
    fill(folder, record_of(task["operators"], "operators of this task", list[Operator]), list(COLLECTIVES), list(SIZES))
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
