"""Computes block costs from marks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.runtime.profiling.measure.recorder import Mark
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack


@dataclass(frozen=True)
class Interval:
    """The interval between two marks."""

    start: Mark
    end: Mark


def blocks_of(stack: Stack) -> tuple[str, ...]:
    """Return the names of a stack's blocks: ``pre``, one per kind of layers, ``post``."""
    return ("pre", *dict.fromkeys(map(layer_block, stack.kinds)), "post")


class Run:
    """One microbatch: its marks by name, and the intervals of the blocks."""

    def __init__(
        self,
        marks: Sequence[Mark],
        stacks: Sequence[Stack],
        side_bytes: Mapping[str, tuple[int, int]] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        input_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.shapes = shapes or {}
        """Shapes of the hidden states at boundaries, under the names of ``Recorder``."""
        self.marks = {mark.name: mark for mark in marks}
        self.side_bytes = side_bytes or {}
        self.input_bytes = input_bytes or {}
        """Bytes of each stack's input."""
        order = [mark.name for mark in marks]
        self.stacks = sorted(stacks, key=lambda stack: self._position(order, f"forward {stack.name} 0"))
        self._order = order

    @staticmethod
    def _position(order: list[str], name: str) -> int:
        if name not in order:
            raise ProfileError(f"the measured microbatch never ran {name.split()[1]}; give data that uses it.")
        return order.index(name)

    def forward(self, stack: Stack, block: str) -> list[Interval]:
        """Return the forward intervals of a block: one for pre and post, one per layer of a kind."""
        count = len(stack.layers)
        names = [f"forward {stack.name} {boundary}" for boundary in range(count + 1)]
        if block not in ("pre", "post"):
            return self._of_kind(names, stack.kinds, block)
        index = self.stacks.index(stack)
        if block == "pre":
            before = "forward begin" if index == 0 else self._module_end(self.stacks[index - 1])
            return self._between([before, names[0]])
        after = "forward end" if index == len(self.stacks) - 1 else self._module_end(stack)
        return self._between([names[-1], after])

    def backward(self, stack: Stack, block: str) -> list[Interval]:
        """Return the backward intervals of a block in execution order; empty if no gradient passes."""
        count = len(stack.layers)
        names = [f"backward {stack.name} {boundary}" for boundary in reversed(range(count + 1))]
        if block not in ("pre", "post"):
            return self._of_kind(names, stack.kinds[::-1], block)
        index = self.stacks.index(stack)
        if block == "post":
            start = "forward end" if index == len(self.stacks) - 1 else self._module_end(stack, "backward")
            return self._between([start, names[0]])
        # The pre block's backward ends when an earlier module receives its gradient, or with the microbatch.
        earlier = [self._module_end(other, "backward") for other in self.stacks[:index]]
        reached = [name for name in earlier if name in self.marks]
        last = min(reached, key=self._order.index) if reached else "backward end"
        return self._between([names[-1], last])

    def _module_end(self, stack: Stack, direction: str = "forward") -> str:
        return f"{direction} {stack.name} {len(stack.layers) + 1}"

    def _of_kind(self, names: list[str], kinds: Sequence[int], block: str) -> list[Interval]:
        layers = zip(itertools.pairwise(names), kinds, strict=True)
        return [interval for pair, kind in layers if layer_block(kind) == block for interval in self._between([*pair])]

    def _between(self, names: list[str]) -> list[Interval]:
        pairs = itertools.pairwise(names)
        return [Interval(self.marks[a], self.marks[b]) for a, b in pairs if a in self.marks and b in self.marks]


def block_costs(
    timed: Sequence[Run], tracked: Run, seconds_between: Callable[[Any, Any], float]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return per stack and block ``forward_us``, ``backward_us`` (medians over ``timed``), and the bytes of
    ``tracked``."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for stack in tracked.stacks:
        result[stack.name] = {}
        for block in blocks_of(stack):
            times = {
                direction: statistics.median(
                    [
                        seconds_between(interval.start.clock, interval.end.clock) * 1e6
                        for run in timed
                        for interval in getattr(run, direction)(stack, block)
                    ]
                    or [0.0]
                )
                for direction in ("forward", "backward")
            }
            forward, backward = tracked.forward(stack, block), tracked.backward(stack, block)
            moved = _moved_bytes(tracked, stack, block)
            result[stack.name][block] = {
                "forward_us": max(0.0, times["forward"]),
                "backward_us": max(0.0, times["backward"]),
                "saved_bytes": _mean([item.end.live_bytes - item.start.live_bytes + moved for item in forward]),
                "forward_peak_bytes": _mean(
                    [item.end.peak_bytes - item.end.live_bytes - max(0, moved) for item in forward]
                ),
                "backward_peak_bytes": _mean(
                    [item.end.peak_bytes - (item.start.live_bytes - item.start.tensor_bytes) for item in backward]
                ),
                "output_bytes": _mean([item.end.tensor_bytes for item in forward]),
            }
    return result


def batch_bytes(tracked: Run) -> tuple[int, int]:
    """Return the bytes of the microbatch's data, and of the part that the forward saved; (0, 0) without a mark."""
    names = ("forward begin", "forward loaded", "forward computed", "forward returned")
    if any(name not in tracked.marks for name in names):
        return 0, 0
    begin, loaded, computed, returned = (tracked.marks[name].live_bytes for name in names)
    total = max(0, loaded - begin)
    return total, total - min(total, max(0, computed - returned))


def _moved_bytes(tracked: Run, stack: Stack, block: str) -> int:
    """Return the part of a block's live bytes that belongs to the batch or the side inputs, to add to
    ``saved_bytes``."""
    total, kept = tracked.side_bytes.get(stack.name, (0, 0))
    batch, kept_batch = batch_bytes(tracked)
    index = tracked.stacks.index(stack)
    moved = 0
    if block == "pre":
        moved = -total - (batch - kept_batch if index == 0 else 0)
    elif block == "post":
        moved = total - kept + (batch - kept_batch if index == len(tracked.stacks) - 1 else 0)
    return moved


def _mean(values: Sequence[float]) -> float:
    return max(0.0, statistics.fmean(values)) if values else 0.0
