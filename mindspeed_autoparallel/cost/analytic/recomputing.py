"""Which layers of a stage run again before their backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.workload import Workload


def run_again(work: Workload, stage: int) -> list[int]:
    """Return by chunk of a stage how many of its first layers run again in full."""
    detail, numbers = work.recompute_detail, list[int]()
    left = detail.num_layers
    for chunk in work.stages[stage].chunks:
        again = 0
        if work.recompute == "full":
            again = len(chunk) if detail.method == "uniform" else min(left, len(chunk))
        if detail.per_rank:
            left -= again
        numbers.append(again)
    return numbers


def split_layers(work: Workload, stage: int) -> Iterator[tuple[LayerKind, bool, int]]:
    """Yield kind, whether they run again in full, and number of the decoder layers of a stage.

    Method ``block`` runs the first ``num_layers`` of each chunk again (MindSpeed counts a rank's where told so),
    ``uniform`` all of them.
    """
    counted: Counter[tuple[LayerKind, bool]] = Counter()
    for chunk, again in zip(work.stages[stage].chunks, run_again(work, stage), strict=True):
        for index, kind in enumerate(chunk):
            counted[kind, index < again] += 1
    for (kind, recomputed), number in counted.items():
        yield kind, recomputed, number
