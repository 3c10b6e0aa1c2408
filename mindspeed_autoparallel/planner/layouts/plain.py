"""The plain recipe of a layout: what Megatron runs without a layout string and with one recompute policy for all
stages.

One chunk per rank, the decoder's layers spread evenly (if stages do not divide them, the last stage has the rest),
encoders on the first stage, and the same recompute on every stage: none, one selective kind for all layers, or full
recompute of the first k layers of each stage.
"""

from __future__ import annotations

from math import inf

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.placement import ModulePlacement


def is_plain(candidate: Candidate) -> bool:
    """Return whether a layout has a plain recipe: one chunk per rank in 1F1B, and a layer left for the last stage."""
    layout = candidate.layout
    alone = layout.virtual_size == 1 and layout.schedule == "1f1b" and not layout.paired and layout.sharding is None
    return alone and _even(candidate.profile.model.modules[-1].num_layers, layout.pipeline_size)[-1] > 0


def _even(num_layers: int, size: int) -> tuple[int, ...]:
    """Return the number of layers by stage: equal numbers, and the rest on the last stage."""
    each = -(-num_layers // size)
    return (*[each] * (size - 1), num_layers - each * (size - 1))


def plain_recipe(candidate: Candidate, cutoff_us: float = inf) -> Evaluation | None:
    """Return the layout's fastest plain recipe that fits, or ``None`` if none fits in less than ``cutoff_us``."""
    recipe = _Recipe(candidate)
    try:
        best = recipe.evaluated("", 0)
    except ConfigError:
        return None  # The host cannot run an even split, as with features that go to a later stage (deepstack).
    if best.step_us >= cutoff_us:
        return None
    if best.fits:
        return best
    found = [again for kind in recipe.selective() if (again := recipe.evaluated(kind, recipe.most)).fits]
    if "full" in recipe.kinds and (fewest := recipe.fewest_full()) is not None:
        found.append(fewest)
    fastest = min(found, key=lambda item: item.step_us, default=None)
    return fastest if fastest is not None and fastest.step_us < cutoff_us else None


class _Recipe:
    """Plain placements of one layout, evaluated."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, model = candidate, candidate.profile.model
        size, decoder = candidate.layout.pipeline_size, model.modules[-1]
        held = _even(decoder.num_layers, size)
        self.most = held[0]
        """Decoder layers of a stage; the last stage may have another number."""
        first = {module.name: (module.num_layers, *[0] * (size - 1)) for module in model.modules[:-1]}
        self._layers = {**first, decoder.name: held}
        self.kinds = set(candidate.measurement.modules[decoder.name].layer.recompute) - {"none"}

    def selective(self) -> list[str]:
        """Return the kinds of recompute that cover parts of a layer."""
        return sorted(kind for kind in self.kinds if kind.startswith("selective"))

    def fewest_full(self) -> Evaluation | None:
        """Return the recipe with the fewest fully recomputed layers per stage that fits, or ``None``."""
        low, high = 1, self.most
        best = self.evaluated("full", high)
        if not best.fits:
            return None
        while low < high:
            middle = (low + high) // 2
            found = self.evaluated("full", middle)
            low, high = (low, middle) if found.fits else (middle + 1, high)
            best = found if found.fits else best
        return best

    def evaluated(self, kind: str, number: int) -> Evaluation:
        """Return the recipe with ``number`` layers of each stage recomputed by ``kind``."""
        again = {
            name: {kind: tuple(min(number, count) for count in row)} if kind else {}
            for name, row in self._layers.items()
        }
        for name, cost in self._candidate.measurement.modules.items():
            again[name] = {key: row for key, row in again[name].items() if key in cost.layer.recompute}
        return evaluated(self._candidate, ModulePlacement(layers=dict(self._layers), recompute=again))
