"""Macro-batches of one encoder in a step, and the memory that they hold on its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.redistribution import EncoderExchange, moved_samples, stage_loads
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.spec.hetero import EncoderMemory


@dataclass(frozen=True, kw_only=True)
class Window:
    """``count`` equal macro-batches of one step."""

    count: int
    samples: int
    """Per macro-batch, on the busiest replica."""
    inputs: float
    """Input bytes on the busiest rank of each transfer."""
    outputs: float
    gradients: float
    again: bool
    """Whether the forward runs again before the backward."""
    loads: tuple[int, ...]
    """Samples by stage of the backbone, on the busiest replica there; empty for an encoder with a pipeline."""

    @property
    def moved_bytes(self) -> float:
        return self.inputs + self.outputs + self.gradients


def windows_of(costs: EncoderCosts, exchange: EncoderExchange, candidate: Candidate, *, again: bool) -> list[Window]:
    """Return the macro-batches of a step: full ones, then the remainder."""
    scale, per_microbatch = exchange.encoder.micro_batch_scale, candidate.layout.micro_batch_size
    full, rest = divmod(candidate.num_microbatches, scale)
    found: list[Window] = []
    for microbatches, count in [(scale, full)] * bool(full) + [(rest, 1)] * bool(rest):
        samples = exchange.samples_of_busiest(microbatches * per_microbatch)
        moved = moved_samples(exchange, microbatches * per_microbatch)
        found.append(
            Window(
                count=count,
                samples=samples,
                inputs=moved.inputs * costs.batch(samples).input_bytes / samples,
                outputs=costs.output_bytes(moved.outputs),
                gradients=costs.output_bytes(moved.gradients) if costs.trained else 0.0,
                again=again,
                loads=tuple(stage_loads(exchange, microbatches * per_microbatch))
                if exchange.encoder.pipeline_size == 1
                else (),
            )
        )
    return found


def stage_memory(
    costs: EncoderCosts,
    windows: Sequence[Window],
    state_bytes: Sequence[int],
    held: Sequence[tuple[int, int]],
    alive: int | None,
) -> tuple[EncoderMemory, ...]:
    """Return the memory of ranks by stage of the encoder's pipeline or, without one, of the backbone: replicas on later
    stages may have fewer samples. Empty if all hold the same.

    ``alive``: macro-batches held at once, in mode window.
    """
    if len(state_bytes) == 1:
        by_stage = zip(*(window.loads for window in windows), strict=True)
        held = []
        for loads in by_stage:
            own = [replace(window, samples=samples) for window, samples in zip(windows, loads, strict=True) if samples]
            held.append(held_upfront(costs, own, 0, 1) if alive is None else held_in_window(costs, own, alive))
        state_bytes = [*state_bytes] * len(held)
    found = tuple(
        EncoderMemory(state_bytes=state, kept_bytes=kept, transient_bytes=transient)
        for state, (kept, transient) in zip(state_bytes, held, strict=True)
    )
    return found if len(set(found)) > 1 else ()


def held_upfront(costs: EncoderCosts, windows: Sequence[Window], stage: int, num_stages: int) -> tuple[int, int]:
    """Return bytes that a stage keeps from forward to backward, and the peak above them while it runs."""
    kept = transient = 0
    for window in windows:
        batch = costs.staged(window.samples, num_stages)[stage]
        if costs.trained:
            kept += window.count * (batch.input_bytes if window.again else batch.saved_bytes)
        # Recomputed batches that wait for their gradient: as many as 1F1B has in flight.
        running = min(window.count, num_stages - stage) if window.again else 0 if costs.trained else 1
        transient = max(transient, batch.transient_bytes + running * batch.saved_bytes)
    return kept, transient


def held_in_window(costs: EncoderCosts, windows: Sequence[Window], alive: int) -> tuple[int, int]:
    """Return bytes of ``alive`` macro-batches, one of them running: encoders run while the pipeline does."""
    batches = [costs.batch(window.samples) for window in windows]
    saved = max((batch.saved_bytes for batch in batches), default=0) if costs.trained else 0
    transient = max(
        (batch.transient_bytes + (0 if costs.trained else batch.saved_bytes) for batch in batches), default=0
    )
    return alive * saved + transient, 0
