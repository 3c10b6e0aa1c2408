"""Steps of the user's own model and data, measured inside the trainer at several micro batch sizes."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles.sharded import CostPoint
from mindspeed_autoparallel.runtime.fsdp2.frames import Passed
from mindspeed_autoparallel.runtime.fsdp2.modules import FoundModules
from mindspeed_autoparallel.runtime.fsdp2.saved import (
    AttentionCalls,
    SavedBytes,
    attention_calls,
    nothing_saved,
    saved_bytes,
)
from mindspeed_autoparallel.runtime.fsdp2.timeline import Timeline
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer

_TIMED_STEPS = 3


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements at one micro batch size, by module name; ``forward`` and ``backward`` are medians over steps."""

    at: CostPoint
    forward: dict[str, Passed]
    backward: dict[str, Passed]
    transient_forward: dict[str, Passed]
    transient_backward: dict[str, Passed]
    unsaved_forward: dict[str, Passed]
    """Transients of a forward that saves nothing, above the level at its start."""
    saved: SavedBytes
    attention: AttentionCalls
    inputs: dict[str, tuple[int, bool]]
    shapes: dict[str, tuple[int, ...]]
    output_bytes: dict[str, int]
    order: tuple[str, ...]
    tokens_per_sample: int


def measure_steps(trainer: Any, native: NativeTrainer, found: FoundModules, device: Any) -> list[MeasuredStep]:
    """Return one measured step per micro batch size that fits: 1, the file's own and twice that.

    ``ConfigError`` if not even one sample fits.
    """
    own = native.config.sizes.micro_batch
    steps: list[MeasuredStep] = []
    for size in sorted({1, own, 2 * own}):
        batch = _batch(trainer, native, size)
        if batch is None:
            break
        try:
            steps.append(_measure(trainer, native, found, device, (size, batch)))
        except RuntimeError as error:
            if not device.is_out_of_memory(error):
                raise
            break
    if not steps:
        raise ConfigError(
            f"{native.config.path}: not one sample fits these devices without recomputation. Start the search on more "
            "devices, or plan from computed costs: mindspeed-autoparallel plan --fsdp2."
        )
    return steps


def _batch(trainer: Any, native: NativeTrainer, size: int) -> Any:
    """Return the first micro batch of ``size`` samples; ``None`` if the data set is too small."""
    native.set_values({"training.micro_batch_size": size})
    loader = trainer.get_dataloader()
    loader = loader[0] if isinstance(loader, tuple) else loader
    build = vars(_module_of(type(trainer.trainer))).get("build_iterations")
    iterator = build(loader)[0] if build else iter(loader)
    try:
        return next(iterator)
    except (StopIteration, ZeroDivisionError):
        return None


def _module_of(kind: type) -> Any:
    return next(sys.modules[base.__module__] for base in kind.__mro__ if base.__name__ == "TrainEngine")


def _measure(
    trainer: Any, native: NativeTrainer, found: FoundModules, device: Any, sized: tuple[int, Any]
) -> MeasuredStep:
    size, batch = sized
    engine, model = trainer.trainer, trainer.model
    names = [module.name for module in found.modules]
    timeline = Timeline(device.synchronize)
    handles = timeline.attach(model, names)
    forward: list[dict[str, Passed]] = []
    backward: list[dict[str, Passed]] = []

    def step() -> None:
        timeline.start()
        engine.train_step(itertools.repeat(batch))
        engine.optimizer.zero_grad()

    try:
        step()
        for _ in range(_TIMED_STEPS):
            step()
            forward.append(timeline.forward)
            backward.append(timeline.backward)
        layers = {module.name for module in found.modules if module.is_layer}
        running = lambda: timeline.innermost[0] if timeline.innermost else None
        with attention_calls(running, device.synchronize) as attention, saved_bytes(timeline, layers) as saved:
            step()
        saved.around = {name: passed.around_bytes for name, passed in timeline.forward.items()}
        with device.tracked_memory() as probe:
            timeline.probe, timeline.saves_nothing = probe, True
            with nothing_saved(engine.optimizer):
                step()
            unsaved, timeline.saves_nothing = timeline.forward, False
            step()
    finally:
        for handle in handles:
            handle.remove()
    return MeasuredStep(
        at=_point(native, size),
        forward=_median(forward),
        backward=_median(backward),
        transient_forward=timeline.forward,
        transient_backward=timeline.backward,
        unsaved_forward=unsaved,
        saved=saved,
        attention=attention,
        inputs=timeline.inputs,
        shapes=timeline.shapes,
        output_bytes=timeline.output_bytes,
        order=tuple(timeline.order),
        tokens_per_sample=_tokens(batch),
    )


def _point(native: NativeTrainer, size: int) -> CostPoint:
    sizes = native.config.sizes
    return CostPoint(micro_batch_size=size, ulysses_size=sizes.ulysses, ring_size=sizes.ring, expert_size=sizes.expert)


def _tokens(batch: Any) -> int:
    # A batch is a dictionary, or a class of transformers that behaves like one.
    tokens = batch.get("input_ids") if hasattr(batch, "get") else None
    return int(tokens.shape[-1]) if tokens is not None else 1


def _median(steps: Sequence[dict[str, Passed]]) -> dict[str, Passed]:
    names = {name for step in steps for name in step}
    return {
        name: Passed(
            head_us=statistics.median(step.get(name, Passed()).head_us for step in steps),
            tail_us=statistics.median(step.get(name, Passed()).tail_us for step in steps),
            num_segments=max(step.get(name, Passed()).num_segments for step in steps),
        )
        for name in names
    }
