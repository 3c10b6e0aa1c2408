"""Where items lie among a microbatch's tokens, checked: every item's tokens in one sample, every token of an item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mindspeed_autoparallel.errors import ConfigError


class Place(NamedTuple):
    """Where an item's tokens lie."""

    sample: int
    first_token: int | None
    """None where other tokens lie between them."""


def places_of(marked: torch.Tensor, sizes: Sequence[int], kind: str) -> list[Place]:
    """Return where each item's tokens lie. ``marked [b, s]``: the places of their tokens; ``sizes``: tokens per item.

    A batch without such tokens carries a stand-in input, which is no item: the list is empty then.
    ``ConfigError`` names the first sample whose tokens are not those of whole items.
    """
    found: list[Place] = []
    if not bool(marked.any()):
        return found
    for sample, row in enumerate(marked):
        tokens = row.nonzero().flatten().tolist()
        given = 0
        while given < len(tokens) and len(found) < len(sizes):
            size = sizes[len(found)]
            own = tokens[given : given + size]
            found.append(Place(sample, own[0] if own[-1] - own[0] == size - 1 else None))
            given += size
        if given != len(tokens):
            raise ConfigError(
                f"sample {sample} of the microbatch has {len(tokens)} {kind} tokens, but its {kind} inputs make "
                f"{given}. Check the sample's placeholders against its files."
            )
    if len(found) < len(sizes):
        raise ConfigError(
            f"the microbatch has {len(sizes)} {kind} inputs, but tokens for {len(found)} of them (the last in sample "
            f"{found[-1].sample})."
        )
    return found
