"""One policy for the first layers of a model, the only choice of some hosts: the fewest layers that fit, or any
number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mindspeed_autoparallel.schedule.sharded import Replayed

Policies = dict[str, str]
"""Policy by layer name."""
Run = Callable[[Policies], Replayed]
Layers = Mapping[str, Sequence[str]]
"""Layers that may have each policy, in order."""


def fewest_first(layers: Layers, run: Run, limit_bytes: int, *, all_or_none: bool) -> tuple[Replayed, Policies] | None:
    """Return the fastest choice, with each policy on the fewest first layers that fit; ``None`` if none fits."""
    best: tuple[Replayed, Policies] | None = None
    for policy, names in layers.items():
        low, high, fits = len(names) if all_or_none else 1, len(names), None
        while low <= high and names:
            middle = (low + high) // 2
            policies = dict.fromkeys(names[:middle], policy)
            outcome = run(policies)
            if outcome.peak_bytes <= limit_bytes:
                fits, high = (outcome, policies), middle - 1
            else:
                low = middle + 1
        if fits and (best is None or fits[0].step_ns < best[0].step_ns):
            best = fits
    return best


def every_number(layers: Layers, run: Run, limit_bytes: int) -> tuple[Replayed, Policies] | None:
    """Return the fastest choice that fits, over all policies and numbers of first layers, zero included."""
    rows = [
        dict.fromkeys(names[:number], policy) for policy, names in layers.items() for number in range(1, len(names) + 1)
    ]
    outcomes = [(run(row), row) for row in [{}, *rows]]
    return min(
        (one for one in outcomes if one[0].peak_bytes <= limit_bytes), key=lambda one: one[0].step_ns, default=None
    )
