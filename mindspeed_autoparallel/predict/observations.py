"""Measured runs as observations: the run that a log's arguments describe, its step, and a plausibility check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.fitting import predicted_ms, with_values
from mindspeed_autoparallel.predict.megatron_arguments import request_of_arguments
from mindspeed_autoparallel.predict.training_log import TrainingLog

SHARES = {"gemm_fraction": 0.2, "attention_fraction": 0.2, "memory_fraction": 0.2, "link_fraction": 0.3,
           "inter_fraction": 0.3, "expert_fraction": 0.2}  # fmt: skip
HOST_TIMES = {
    "launch_us": 0.4,
    "step_us": 0.5,
    "tensor_launch_us": 0.4,
    "point_to_point_us": 0.4,
    "link_latency_us": 0.4,
}
"""How far the logarithm of a figure may lie from the catalogue's: shares of datasheets less than what hosts take."""
_FLOOR = 0.8
"""Least ratio to a step at the datasheet's peaks; the formulas add time for tiles and missing overlap."""
_SLOWEST = 10.0
"""Ratio to the predicted step above which a log is rejected."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured run."""

    request: Mapping[str, object]
    step_ms: float
    spread: float
    """Relative standard deviation of ``step_ms``."""
    source: str
    """Name and digest of the log, steps that counted."""

    @property
    def work(self) -> Workload:
        """Return the run as a workload."""
        return read_workload(self.request)


def observation_of(
    log: TrainingLog, device: Device, devices_per_node: int, network_gbit_per_s: float | None
) -> Observation:
    """Return what ``log`` measured on ``device``; raises ``ConfigError`` for runs that are not modelled, and for steps
    that the device cannot take."""
    world = log.arguments.get("world_size")
    if world is None or not world.isdigit():
        raise ConfigError(f"{log.name}: its arguments have no world_size; the log is ignored.")
    arguments = {**log.arguments, "global_batch_size": log.global_batch or log.arguments.get("global_batch_size")}
    source = f"{log.name} (sha256 {log.digest}, {log.num_steps} steps)"
    try:
        request = request_of_run(arguments, int(world), device.name, devices_per_node, network_gbit_per_s)
        found = Observation(request=request, step_ms=log.step_ms, spread=log.spread, source=source)
        check_possible(found, device)
        return found
    except ConfigError as error:
        raise ConfigError(f"{log.name}: {error} The log is ignored.") from error


def request_of_run(
    arguments: Mapping[str, object],
    num_devices: int,
    device: str,
    devices_per_node: int,
    network_gbit_per_s: float | None = None,
) -> dict[str, object]:
    """Return the request of a run with Megatron's ``arguments``; raises ``ConfigError`` for what is not modelled."""
    hardware: dict[str, object] = {
        "gpu": device,
        "num_gpus": num_devices,
        "gpus_per_node": min(num_devices, devices_per_node),
    }
    if network_gbit_per_s:
        hardware["inter_node_gbps"] = network_gbit_per_s
    request = request_of_arguments(arguments, hardware)
    read_workload(request)
    return request


def check_possible(observation: Observation, device: Device) -> None:
    """Raise ``ConfigError`` where no step of the run could have the observed length: another unit, device or layout.

    The least is that of every share of the datasheet reached in full and a host that takes no time.
    """
    work = observation.work
    whole = dict.fromkeys((*SHARES, "fp8_fraction"), 1.0)
    ideal = with_values(device, work.stack, {**whole, **dict.fromkeys(HOST_TIMES, 0.0), "corrections": ()})
    least, usual = (float(predicted_ms(each, [work])[0]) for each in (ideal, device))
    least *= _FLOOR
    if observation.step_ms < least:
        raise ConfigError(
            f"a step of {observation.step_ms:.4g} ms is shorter than the {least:.4g} ms that {work.num_devices} "
            f"{device.name} take at their datasheet's peaks: check its unit, --device, and whether the figure is of a "
            "node or of a device."
        )
    if observation.step_ms > _SLOWEST * usual:
        raise ConfigError(
            f"a step of {observation.step_ms:.4g} ms is more than {_SLOWEST:g} times the {usual:.4g} ms that are "
            "predicted: check its unit, --device, and whether the machine was shared."
        )
