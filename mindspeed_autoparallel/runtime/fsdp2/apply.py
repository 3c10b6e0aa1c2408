"""``--auto-parallel-plan`` in the native trainer: applies the plan to its arguments, and compares prediction with
measurement."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import HOST_NAME, decided_sizes, decided_values
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.fsdp2.flags import NativeRequest
from mindspeed_autoparallel.runtime.fsdp2.modules import find_modules
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer, before_sharding, say, world_size
from mindspeed_autoparallel.spec.sharded import ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan
from mindspeed_autoparallel.units import MIB, US_PER_MS

_WATCHED_STEP = 2
"""The step whose memory is tracked on a CPU, where tracking slows a step down; step 1 creates optimizer states."""


def prepare_plan(native: NativeTrainer, request: NativeRequest) -> None:
    """Apply the plan of ``request``, and compare its prediction with measured steps."""
    assert request.plan is not None
    plan = read_plan(native, request.plan)
    if plan.decisions.sizes.num_devices != world_size():
        raise PlanError(
            f"{request.plan} is for {plan.decisions.sizes.num_devices} devices, and {world_size()} processes run: "
            "start as many, or plan for these."
        )
    set_plan(native, plan, request.plan)
    _Comparison(plan, request.check_steps).attach(native)


def set_plan(native: NativeTrainer, plan: ShardedPlan, path: Path) -> None:
    """Set the sizes of ``plan`` now, before groups exist, and its lists of modules once the model is built."""
    sizes = plan.decisions.sizes
    native.set_values(decided_sizes(native.config, plan.decisions))
    # The trainer derived these from the YAML's sizes when it parsed the file.
    native.set_values(
        {
            "parallel.fully_shard_parallel_size": sizes.fully_shard_size,
            "parallel.expert_fully_shard_parallel_size": _expert_shard(sizes),
            "parallel.data_parallel_size": sizes.num_devices // sizes.context_size,
        }
    )
    say(f"training with {path}: {plan.decisions.sizes.label()}")

    def set_modules(model: Any) -> None:
        modules = find_modules(model, native.config).modules
        for pattern, layers in plan.decisions.policies.items():
            count = sum(module.pattern == pattern and module.is_layer for module in modules)
            if count != len(layers):
                raise PlanError(
                    f"{path} has {len(layers)} layers {pattern}, this model {count}: a plan of another model."
                )
        native.set_values(decided_values(native.config, plan.decisions, modules))

    before_sharding(native, set_modules)


def _expert_shard(sizes: ShardSizes) -> int:
    """Return the shard size of the trainer's expert mesh, which spans all devices without expert parallelism."""
    return sizes.expert_shard_size if sizes.expert_size > 1 else sizes.num_devices


def read_plan(native: NativeTrainer, path: Path) -> ShardedPlan:
    """Read a plan of the trainer's model; ``PlanError`` if it is for another trainer or model."""
    plan = ShardedPlan.read(path)
    name = native.config.model_id or native.config.model_path
    if plan.host != HOST_NAME:
        raise PlanError(f"{path} is a plan for {plan.host}, not for {HOST_NAME}.")
    if plan.model != name:
        raise PlanError(f"{path} is a plan of {plan.model}; {native.config.path} trains {name}.")
    return plan


class _Comparison:
    """Compares predicted and measured step time and peak memory after ``num_steps`` steps, at least three."""

    def __init__(self, plan: ShardedPlan, num_steps: int) -> None:
        self._plan = plan
        self._last = max(num_steps, _WATCHED_STEP + 1)
        self._times_ms: list[float] = []
        self._peak_bytes = 0
        self._step = 0
        self._is_done = False

    def attach(self, native: NativeTrainer) -> None:
        """Wrap the engine's ``train_step`` and ``training_log``."""
        engine, device = native.module.TrainEngine, current_device()
        train_step, training_log = engine.train_step, engine.training_log

        @functools.wraps(train_step)
        def watched(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._step += 1
            if self._step > self._last or (device.name == "cpu" and self._step != _WATCHED_STEP):
                return train_step(this, *args, **kwargs)
            with device.tracked_memory() as probe:
                result = train_step(this, *args, **kwargs)
                self._peak_bytes = max(self._peak_bytes, probe.take_peak_bytes())
            return result

        @functools.wraps(training_log)
        def logged(this: Any, iteration: int, elapsed: float, *args: Any, **kwargs: Any) -> Any:
            result = training_log(this, iteration, elapsed, *args, **kwargs)
            if self._step > 1 and (device.name != "cpu" or self._step != _WATCHED_STEP):
                self._times_ms.append(elapsed * 1e3)
            # A host that logs every ten steps logs none at the last one.
            if self._step >= self._last and not self._is_done:
                self._is_done = True
                self._compare(device)
            return result

        engine.train_step, engine.training_log = watched, logged

    def _compare(self, device: Any) -> None:
        import torch

        place = "cpu" if device.name == "cpu" else device.name
        measured = torch.tensor([statistics.median(self._times_ms), float(self._peak_bytes)], device=place)
        measured = measured.double() if place == "cpu" else measured
        torch.distributed.all_reduce(measured, op=torch.distributed.ReduceOp.MAX)
        step_ms, peak = measured.tolist()
        predicted_ms, predicted_peak = self._plan.step.total_us / US_PER_MS, self._plan.memory.peak_bytes
        say(
            f"step {predicted_ms:.1f} ms predicted, {step_ms:.1f} ms measured ({predicted_ms / step_ms - 1:+.1%}); "
            f"peak {predicted_peak / MIB:.1f} MiB predicted, {peak / MIB:.1f} MiB measured "
            f"({predicted_peak / peak - 1:+.1%}), median of {len(self._times_ms)} steps "
            f"({min(self._times_ms):.1f} to {max(self._times_ms):.1f} ms), largest of the ranks"
        )
