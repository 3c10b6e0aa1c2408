"""Hybrid models for ``draw``: a letter per layer, and what follows ``/`` predicts further tokens."""

from __future__ import annotations

import random

WORDS = (
    "--spec local_hybrid hybrid_stack_spec --mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 2 "
    "--linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 4 --linear-num-value-heads 4 "
    "--hybrid-layer-pattern "
)
"""Of every hybrid model; the pattern follows."""
MUST: tuple[dict[str, object], ...] = (
    {"pattern": "*-*-*-", "pipeline": 2},
    {"pattern": "M-*-M", "tensor": 2, "pipeline": 1},
    {"pattern": "ME*E", "expert": 2},
    {"pattern": "G-*-GE", "pipeline": 2, "virtual": 2},
    {"pattern": "M-*-/*-", "pipeline": 2},
    {"pattern": "GM*EM", "tensor": 2, "pipeline": 2},
)
"""What the first draws have, whatever else is drawn beside it."""
_LETTERS = "MMM**--EG"
"""Mamba, attention, MLP, experts, gated delta net."""


def drawn(draw: random.Random, pattern: str) -> dict[str, object]:
    """Return what a hybrid model of ``pattern``, or of one that is drawn, must have."""
    if not pattern:
        pattern = "".join(draw.choice(_LETTERS) for _ in range(draw.randint(4, 7)))
        pattern += draw.choice(("", "", "/*-", "/M", "/M/M"))
    return {
        "pattern": pattern,
        "attention": draw.choice(("mha", "gqa")),
        # A gated delta net's convolution has SiLU.
        "mlp": "swiglu" if "G" in pattern else draw.choice(("swiglu", "gelu", "squared relu")),
        "bias": "no bias",
        "positions": "rope",
        "experts": draw.choice(("experts", "shared")) if "E" in pattern else "dense",
        "prediction": "mtp" if "/" in pattern else "",
    }
