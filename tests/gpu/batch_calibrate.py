"""A factor per kind of block on the predicted times, fitted to ten of the measured blocks and scored on the others."""

from __future__ import annotations

import math
import statistics
from typing import Any

from kit import lines_of

FITTED_OF_A_KIND = 2


def fitted_and_scored(blocks: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two blocks of every kind, the first and the middle one, and all the others; of two blocks, one is fitted.

    Five kinds have predictions, so ten blocks are fitted.
    """
    fitted = []
    for kind in dict.fromkeys(block["block"] for block in blocks):
        own = [block for block in blocks if block["block"] == kind]
        fitted += [own[0], own[len(own) // 2]][: min(FITTED_OF_A_KIND, max(1, len(own) - 1))]
    return fitted, [block for block in blocks if block not in fitted]


def run(figures: Any) -> None:
    """Read ``blocks.jsonl`` beside this batch's file."""
    source = figures.folder / "blocks.jsonl"
    if not source.exists():
        figures.write(kind="failed", error=f"{source} is missing: run the batch blocks first")
        return
    blocks = [line for line in lines_of(source) if line["kind"] == "figure" and line["predicted"]]
    fitted, scored = fitted_and_scored(blocks)
    for name in ("forward_us", "backward_us"):
        factors = {
            kind: math.exp(
                statistics.mean(
                    math.log(block["measured"][name] / block["predicted"][name])
                    for block in fitted
                    if block["block"] == kind
                )
            )
            for kind in dict.fromkeys(block["block"] for block in fitted)
        }
        errors, before = (
            sorted(abs(factor(block) * block["predicted"][name] / block["measured"][name] - 1) for block in scored)
            for factor in (lambda block: factors[block["block"]], lambda block: 1.0)  # noqa: B023  # used at once
        )
        figures.write(
            kind="score",
            time=name,
            num_fitted=len(fitted),
            num_scored=len(scored),
            factors=factors,
            median_error=statistics.median(errors) if errors else None,
            largest_error=errors[-1] if errors else None,
            median_error_before=statistics.median(before) if before else None,
        )
