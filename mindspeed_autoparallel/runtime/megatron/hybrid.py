"""Hybrid models: a letter per layer in ``--hybrid-layer-pattern``, which also marks the ends of stages.

From Megatron 0.17 on ``|`` in the pattern ends a virtual stage, in chain order; the part after ``/`` lists layers of
multi-token prediction, on the last stage. Up to 0.16 the pattern (``--hybrid-override-pattern``) is cut evenly.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.patching.releases import release_of, within

PATTERN_ARGUMENT = "hybrid_layer_pattern"
OLD_ARGUMENT = "hybrid_override_pattern"
"""The only name up to 0.16; later releases treat it as an alias, and refuse both together."""
_STAGE, _PREDICTION = "|", "/"


def hybrid_pattern(arguments: argparse.Namespace) -> str:
    """Return the script's pattern without stage ends; empty for other models and for releases up to 0.16."""
    if not hasattr(arguments, PATTERN_ARGUMENT):
        return ""
    given = getattr(arguments, PATTERN_ARGUMENT) or getattr(arguments, OLD_ARGUMENT, None)
    return str(given or "").replace(_STAGE, "")


def predicts_further_tokens(arguments: argparse.Namespace) -> bool:
    """Return whether the model has layers of multi-token prediction: by their flag, or in the pattern, from which
    Megatron reads their number while it validates."""
    return bool(getattr(arguments, "mtp_num_layers", None)) or _PREDICTION in hybrid_pattern(arguments)


def recomputes_whole_layers(arguments: argparse.Namespace) -> bool:
    """Return whether this Megatron can train the model with whole layers recomputed.

    Release 0.18 passes a padding mask to the recompute of multi-token prediction, which does not take one.
    """
    release = release_of("megatron-core")
    return not (release and within(release, ">=0.18,<0.19") and predicts_further_tokens(arguments))


def set_pattern(arguments: argparse.Namespace, pattern: str) -> None:
    """Make the host build the layers of ``pattern``; clear the old name, since Megatron refuses both together."""
    setattr(arguments, PATTERN_ARGUMENT, pattern)
    if hasattr(arguments, OLD_ARGUMENT):
        setattr(arguments, OLD_ARGUMENT, None)


def num_pattern_layers(pattern: str) -> int:
    """Return the number of the decoder's layers in a pattern of ``hybrid_pattern``."""
    return len(pattern.partition(_PREDICTION)[0])


def first_of_pattern(pattern: str, num_layers: int) -> str:
    """Return ``pattern`` with only the first ``num_layers`` layers of its decoder."""
    layers, mark, ahead = pattern.partition(_PREDICTION)
    return layers[:num_layers] + mark + ahead


def cut_pattern(pattern: str, counts: Sequence[int]) -> str:
    """Return ``pattern`` with ``counts`` layers on each virtual stage.

    Raises ``PlanError`` if the counts do not add up to the decoder's layers, or one is 0.
    """
    layers, mark, ahead = pattern.partition(_PREDICTION)
    if sum(counts) != len(layers) or not all(counts):
        raise PlanError(
            f"the plan has {list(counts)} layers on its stages, and the pattern {pattern} has {len(layers)}; every "
            "stage needs one or more. Plan this model again, with --no-standalone-ends."
        )
    ends = list(itertools.accumulate(counts, initial=0))
    return _STAGE.join(layers[start:end] for start, end in itertools.pairwise(ends)) + mark + ahead
