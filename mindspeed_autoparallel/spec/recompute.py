"""Names of recompute kinds in profiles and plans: ``none``, ``selective``, ``full``, and what comes after a colon.

``selective``            the modules that the host takes by itself (Megatron: the core attention)
``selective:mlp,moe``    these modules of every layer
``full``                 each layer on its own; its input is kept (Megatron's method ``block``)
``full:4``               groups of four layers; the input of a group is kept (Megatron's method ``uniform``)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RECOMPUTE_KINDS = ("none", "selective", "full")


def base_kind(kind: str) -> str:
    """Return one of ``RECOMPUTE_KINDS``, or whatever stands before the colon."""
    return kind.split(":", 1)[0]


def selective_kind(modules: Sequence[str]) -> str:
    """Return the kind that recomputes ``modules``; the host's own choice where there are none."""
    return ":".join(["selective", *([",".join(modules)] if modules else [])])


def modules_of(kind: str) -> tuple[str, ...]:
    """Return modules of a selective kind; none for the host's own choice."""
    _, _, modules = kind.partition(":")
    return tuple(modules.split(",")) if modules and base_kind(kind) == "selective" else ()


def grouped_kind(num_layers: int) -> str:
    """Return full recompute of groups of ``num_layers``; of single layers it is plain ``full``."""
    return f"full:{num_layers}" if num_layers > 1 else "full"


def layers_per_group(kind: str) -> int:
    """Return layers that are computed again together; 0 where single layers are not recomputed whole."""
    if base_kind(kind) != "full":
        return 0
    _, _, number = kind.partition(":")
    return int(number) if number.isdecimal() else 1


def in_order(kinds: Iterable[str]) -> list[str]:
    """Return kinds as they lie on a stage: layers that are recomputed whole come first."""
    return sorted(kinds, key=lambda kind: (base_kind(kind) != "full", kind))


def is_known(kind: str) -> bool:
    """Return whether it is one of the forms above."""
    base, _, rest = kind.partition(":")
    if not rest:
        return kind in RECOMPUTE_KINDS
    return base == "selective" or (base == "full" and rest.isdecimal() and int(rest) > 1)


def in_words(kind: str) -> str:
    """Return a kind for people: ``selective (mlp, moe)``, ``full (groups of 4)``."""
    if modules := modules_of(kind):
        return f"selective ({', '.join(modules)})"
    return f"full (groups of {number})" if (number := layers_per_group(kind)) > 1 else kind
