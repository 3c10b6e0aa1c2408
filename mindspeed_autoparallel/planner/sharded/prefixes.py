"""One policy for the first layers of a model, as some hosts have it: the fewest that fit, or every number tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mindspeed_autoparallel.schedule.sharded import Replayed

Policies = dict[str, str]
"""Layer name to policy."""
Run = Callable[[Policies], Replayed]
Layers = Mapping[str, Sequence[str]]
"""Policy to the layers that may have it, in order."""


def fewest_first(layers: Layers, run: Run, limit_bytes: int, *, all_or_none: bool) -> tuple[Replayed, Policies] | None:
    """Return the fastest of the policies, each for the fewest first layers that fit; ``None`` where none fits."""
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
    """Return the fastest of all numbers of first layers under all policies, none included, that fits."""
    rows = [
        dict.fromkeys(names[:number], policy) for policy, names in layers.items() for number in range(1, len(names) + 1)
    ]
    outcomes = [(run(row), row) for row in [{}, *rows]]
    return min(
        (one for one in outcomes if one[0].peak_bytes <= limit_bytes), key=lambda one: one[0].step_ns, default=None
    )
