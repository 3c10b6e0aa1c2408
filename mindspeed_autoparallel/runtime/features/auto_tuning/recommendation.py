"""What a tuning's search gives: configurations with all that a user needs to train by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.planner.tuner.candidates import Space
from mindspeed_autoparallel.planner.tuner.placements import SolvedConfiguration
from mindspeed_autoparallel.planner.tuner.search import Outcome
from mindspeed_autoparallel.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A configuration with everything a user needs to train by it."""

    found: SolvedConfiguration
    plan: Plan
    values: Mapping[str, object]
    """Megatron's argument destinations."""
    words: Sequence[str]
    """The configuration as flags."""
    command: Sequence[str]
    """The user's command line with them, under torchrun."""
    flags_to_remove: Sequence[str]
    """Words of the user's command line that would stay in force beside ``words``."""
    relative_error: float
    ends: tuple[float, float] = (1.0, 1.0)
    """Step times, as shares of the predicted one, if modelled switches hide all that the model assumes, and nothing."""

    @property
    def modelled(self) -> tuple[str, ...]:
        """Return switches of it that no measurement has seen."""
        return self.found.configuration.variant.modelled

    @property
    def title(self) -> str:
        """Describe how its layers are run, beside its layout's label."""
        layout = self.plan.layout
        told = layout.sharding.label if layout.sharding is not None else ""
        names = [self.found.configuration.variant.name, *self.modelled]
        return " ".join(name for name in names if name and not (told and name.startswith(told)))


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """What the search gave."""

    picks: list[Recommendation]
    """Fastest first."""
    outcome: Outcome
    space: Space
    refused: dict[str, str]
    """Configurations that Megatron refuses, with its message."""
    baseline: SolvedConfiguration | str
    """The script's own configuration, or why it is not known."""
