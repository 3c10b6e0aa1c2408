"""What is computed again in the backward: a policy, and the text that stands for it in profiles and plans.

``none``                 everything is kept
``selective``            the modules that the host takes by itself (Megatron: the core attention)
``selective:mlp,moe``    these modules of every layer
``full``                 each layer on its own; its input is kept (Megatron's method ``block``)
``full:4``               groups of four layers; the input of a group is kept (Megatron's method ``uniform``)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

RECOMPUTE_KINDS = ("none", "selective", "full")


@dataclass(frozen=True)
class RecomputePolicy:
    """Say which part of a layer is computed again; ``str`` is its text, ``policy_of`` the way back."""

    kind: str
    """One of ``RECOMPUTE_KINDS``."""
    modules: tuple[str, ...] = ()
    """Of a selective policy; none for the host's own choice."""
    layers_per_group: int = 0
    """Layers that are computed again together; 0 where single layers are not recomputed whole."""

    @classmethod
    def selective(cls, modules: Sequence[str] = ()) -> RecomputePolicy:
        """Return the policy that recomputes ``modules``; the host's own choice where there are none."""
        return cls("selective", tuple(modules))

    @classmethod
    def full(cls, num_layers: int = 1) -> RecomputePolicy:
        """Return the policy that recomputes groups of ``num_layers``."""
        return cls("full", (), max(1, num_layers))

    @property
    def words(self) -> str:
        """Return it for people: ``selective (mlp, moe)``, ``full (groups of 4)``."""
        if self.modules:
            return f"selective ({', '.join(self.modules)})"
        return f"full (groups of {self.layers_per_group})" if self.layers_per_group > 1 else self.kind

    def __str__(self) -> str:
        if self.modules:
            return f"{self.kind}:{','.join(self.modules)}"
        return f"full:{self.layers_per_group}" if self.layers_per_group > 1 else self.kind


@lru_cache(maxsize=1024)
def policy_of(text: str) -> RecomputePolicy:
    """Return the policy that ``text`` stands for; ``ValueError`` where it is none."""
    kind, colon, rest = text.partition(":")
    if not colon and kind in RECOMPUTE_KINDS:
        return RecomputePolicy(kind, (), int(kind == "full"))
    if kind == "selective" and rest:
        return RecomputePolicy.selective(rest.split(","))
    if kind == "full" and rest.isdecimal() and int(rest) > 1:
        return RecomputePolicy.full(int(rest))
    raise ValueError(f"{text!r} is no recompute policy: {', '.join(RECOMPUTE_KINDS)}, selective:MODULES, full:LAYERS")


def is_known(text: str) -> bool:
    """Return whether ``text`` stands for a policy."""
    try:
        policy_of(text)
    except ValueError:
        return False
    return True


def in_order(kinds: Iterable[str]) -> list[str]:
    """Return texts as they lie on a stage: layers that are recomputed whole come first."""
    return sorted(kinds, key=lambda kind: (not policy_of(kind).layers_per_group, kind))
