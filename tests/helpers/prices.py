"""What a described run costs, by the one price that every command has."""

from __future__ import annotations

from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.price import price
from mindspeed_autoparallel.spec.plan_records import RankMemory


def step_ms(work: Workload, device: Device | None = None) -> float:
    """Return the step; ``device``: in place of the one that the run names."""
    return price(work, device or find_device(work.gpu)).step.total_us / 1e3


def memory_of(work: Workload, stage: int) -> RankMemory:
    """Return the memory of a pipeline rank."""
    return price(work, find_device(work.gpu)).memory[stage]
