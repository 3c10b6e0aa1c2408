"""What MindSpeed-MM's model.json cannot say of stages: it takes one number of recomputed layers for all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import PlanError

_NUMBER = "recompute_num_layers"
_KEYS = ("recompute_granularity", "recompute_method", _NUMBER)


def is_mindspeed_mm() -> bool:
    """Return whether the script of this process runs under MindSpeed-MM."""
    return "mindspeed_mm" in sys.modules


def ties_embeddings(content: Mapping[str, object]) -> bool:
    """Return whether a model.json's language model shares one matrix between embedding and output layer."""
    block = content.get("text_decoder")
    return isinstance(block, dict) and not block.get("untie_embeddings_and_output_weights", True)


def check_deepstack(content: Mapping[str, object], encoder: Sequence[int], decoder: Sequence[int], path: Path) -> None:
    """Raise ``PlanError`` where features of the vision layers (deepstack) would be lost; layers by virtual stage.

    MindSpeed-MM adds them to the first decoder layers of the stage that ends the encoder, and sends none on: with fewer
    layers there it trains another model without a word.
    """
    needed = _num_vision_features(content)
    if not needed:
        return
    stage = max(v for v, count in enumerate(encoder) if count)
    if any(decoder[:stage]) or decoder[stage] < needed:
        raise PlanError(
            f"{path}: virtual stage {stage} ends the image encoder and holds {decoder[stage]} decoder layers, and "
            f"features of {needed} vision layers are added to the first {needed} decoder layers there "
            f"(deepstack_visual_indexes). Move {needed - decoder[stage]} or more to it in the plan and simulate it, or "
            "raise the memory limit and search again."
        )


def _num_vision_features(content: Mapping[str, object]) -> int:
    block: object = content
    for key in ("image_encoder", "vision_encoder", "deepstack_visual_indexes"):
        block = block.get(key) if isinstance(block, Mapping) else None
    return len(block) if isinstance(block, list) else 0


def keep_stage(content: dict[str, object], pipeline_rank: int) -> list[int]:
    """Turn counts of recomputed layers per stage into the one number of ``pipeline_rank``, in a model.json of its own.

    Returns the pipeline ranks that recompute more than planned: the number holds for every virtual chunk of a rank.
    """
    more: set[int] = set()
    for block in _counted(content):
        chunks = _chunks(block)
        more |= {rank for rank, counts in enumerate(zip(*chunks, strict=True)) if len(set(counts)) > 1}
        _set_number(block, max(counts[pipeline_rank] for counts in chunks))
    return sorted(more)


def keep_largest(content: dict[str, object]) -> None:
    """Turn counts of recomputed layers per stage into the largest, in a model.json that all ranks read."""
    for block in _counted(content):
        _set_number(block, max(max(counts) for counts in _chunks(block)))


def _counted(block: dict[str, object]) -> Iterator[dict[str, object]]:
    """List the blocks that have counts per stage."""
    if isinstance(block.get(_NUMBER), list):
        yield block
    for child in block.values():
        if isinstance(child, dict):
            yield from _counted(child)


def _chunks(block: dict[str, Any]) -> list[list[int]]:
    """Return a list over pipeline ranks for every virtual chunk."""
    counts = block[_NUMBER]
    return counts if counts and isinstance(counts[0], list) else [counts]


def _set_number(block: dict[str, object], number: int) -> None:
    block[_NUMBER] = number
    if not number:
        for key in _KEYS:
            block.pop(key, None)
