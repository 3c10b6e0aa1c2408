"""Trainings of MindSpeed-LLM for ``draw``: what its fused operators' stand-ins compute, with experts and context parallelism."""

from __future__ import annotations

from mindspeed_autoparallel.spec import Plan

_COMMON = (
    "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-rotary-position-embeddings --lr-decay-style constant "
    "--save-interval 10000 --no-shared-storage --ckpt-format torch --distributed-timeout-minutes 3"
)
_NOT_COMMON = ("--no-rope-fusion", "--no-persist-layer-norm")
"""Words of Megatron's rows that this host does not take."""
WORDS = "--eval-interval 1000 --eval-iters 0"
_MODEL: dict[str, object] = {
    "attention": "mha",
    "norm": "RMSNorm",
    "mlp": "swiglu",
    "bias": "no bias",
    "output": "untied",
    "positions": "rope",
    "prediction": "",
    "optimizer": "adam",
    "loss": "",
    "data": "mock",
    "steps": "iterations",
    "script": "",
    "experts": "dense",
}
MUST: tuple[dict[str, object], ...] = (
    {**_MODEL, "experts": "experts", "expert": 2},
    {**_MODEL, "context": 2, "words": "--context-parallel-algo ulysses_cp_algo"},
    {**_MODEL, "experts": "experts", "pipeline": 2, "expert": 2},
    {**_MODEL, "attention": "gqa", "context": 2, "pipeline": 2, "words": "--context-parallel-algo ulysses_cp_algo"},
    {**_MODEL, "context": 2, "words": "--context-parallel-algo megatron_cp_algo"},
    {**_MODEL, "experts": "experts", "context": 2, "expert": 2, "words": "--context-parallel-algo ulysses_cp_algo"},
)
"""All rows: none is drawn beyond these."""


def common(words: str) -> str:
    """Return the ``words`` of Megatron's rows as this host takes them."""
    return " ".join([*(word for word in words.split() if word not in _NOT_COMMON), _COMMON])


def of_plan(plan: Plan) -> str:
    """Return words that this host must find on the command line beside ``plan``."""
    counts = plan.layers_of("text_decoder")
    words = f" --context-parallel-size {plan.layout.context_size}"
    if len(set(counts)) > 1 and plan.layout.virtual_size == 1:
        words += f" --num-layer-list {','.join(map(str, counts))}"
    return words
