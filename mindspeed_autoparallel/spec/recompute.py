"""Recompute policies, and their text form in profiles and plans.

``none``               everything is kept
``selective``          the host's default modules (Megatron: the core attention)
``selective:mlp,moe``  these modules of every layer
``full``               each layer separately; its input is kept (Megatron's method ``block``)
``full:4``             groups of four layers; the input of a group is kept (Megatron's method ``uniform``)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

RECOMPUTE_KINDS = ("none", "selective", "full")


@dataclass(frozen=True)
class RecomputePolicy:
    """The part of a layer that is recomputed; ``str`` returns its text form, ``policy_of`` parses it."""

    kind: str
    """One of ``RECOMPUTE_KINDS``."""
    modules: tuple[str, ...] = ()
    """Modules of a selective policy; empty for the host's default."""
    layers_per_group: int = 0
    """Layers per recomputed group; 0 if layers are not recomputed whole."""

    @classmethod
    def selective(cls, modules: Sequence[str] = ()) -> RecomputePolicy:
        """Return the policy that recomputes ``modules``; the host's default if empty."""
        return cls("selective", tuple(modules))

    @classmethod
    def full(cls, num_layers: int = 1) -> RecomputePolicy:
        """Return the policy that recomputes groups of ``num_layers``."""
        return cls("full", (), max(1, num_layers))

    @property
    def words(self) -> str:
        """Return the displayed name: ``selective (mlp, moe)``, ``full (groups of 4)``."""
        if self.modules:
            return f"selective ({', '.join(self.modules)})"
        return f"full (groups of {self.layers_per_group})" if self.layers_per_group > 1 else self.kind

    def __str__(self) -> str:
        if self.modules:
            return f"{self.kind}:{','.join(self.modules)}"
        return f"full:{self.layers_per_group}" if self.layers_per_group > 1 else self.kind


@lru_cache(maxsize=1024)
def policy_of(text: str) -> RecomputePolicy:
    """Parse ``text``; ``ValueError`` if it is not a policy."""
    kind, colon, rest = text.partition(":")
    if not colon and kind in RECOMPUTE_KINDS:
        return RecomputePolicy(kind, (), int(kind == "full"))
    if kind == "selective" and rest:
        return RecomputePolicy.selective(rest.split(","))
    if kind == "full" and rest.isdecimal() and int(rest) > 1:
        return RecomputePolicy.full(int(rest))
    raise ValueError(
        f"{text!r} is not a recompute policy: {', '.join(RECOMPUTE_KINDS)}, selective:MODULES, full:LAYERS"
    )


def is_known(text: str) -> bool:
    """Return whether ``text`` is a policy."""
    try:
        policy_of(text)
    except ValueError:
        return False
    return True


def in_order(kinds: Iterable[str]) -> list[str]:
    """Return texts in their order on a stage: layers recomputed whole come first."""
    return sorted(kinds, key=lambda kind: (not policy_of(kind).layers_per_group, kind))
