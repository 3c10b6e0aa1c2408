"""Sizes of tensor, sequence, context and expert parallelism and of the micro batch: the points that are traced."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.request import MINIMUM_CONTEXT_TOKENS, TuningRequest

_MICRO_BATCHES = (1, 2, 4, 8)
_MAX_CONTEXT = 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is worth tracing of each."""

    tensor: list[int]
    context: list[int]
    expert: list[int]
    micro_batch: list[int]
    points: tuple[MeasuredAt, ...]
    """Their legal combinations, with sequence parallelism on and off."""


def worthwhile_sizes(context: SearchContext) -> Sizes:
    """Return the sizes that model, ranks and batch allow; the others go to ``left_out``."""
    request, left_out = context.request, context.left_out
    tensor = _tensor_sizes(request, left_out)
    contexts = _context_sizes(request, left_out)
    expert = _expert_sizes(request, left_out)
    batches = _micro_batches(request, left_out)
    points = []
    for tp in tensor:
        for cp in contexts:
            for ep in expert:
                if request.num_ranks % (tp * cp) or (request.num_ranks // tp) % ep:
                    continue
                # Megatron trains experts under tensor parallelism only with sequence parallelism.
                sequence = (False,) if tp == 1 else (True,) if request.num_experts else (True, False)
                for split in sequence:
                    if split and request.sequence_length // cp % tp:
                        reason = _indivisible(request.sequence_length, tp * cp)
                        left_out[f"sequence parallelism TP {tp} CP {cp}"] = reason
                        continue
                    points += [
                        MeasuredAt(
                            tensor_size=tp,
                            context_size=cp,
                            expert_size=ep,
                            micro_batch_size=mbs,
                            sequence_parallel=split,
                        )
                        for mbs in batches
                    ]
    return Sizes(tensor=tensor, context=contexts, expert=expert, micro_batch=batches, points=tuple(points))


def _indivisible(number: int, parts: int) -> str:
    return f"{number} is not divisible by {parts}"


def _powers(highest: int) -> list[int]:
    return [2**power for power in range(highest.bit_length()) if 2**power <= highest]


def _tensor_sizes(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    found = []
    for size in _powers(request.devices_per_node):
        reason = next(
            (
                f"{number} {what} cannot be split over {size}"
                for number, what in ((request.num_heads, "heads"), (request.ffn_hidden_size, "FFN columns"))
                if number % size
            ),
            "",
        )
        groups = request.num_query_groups
        if not reason and max(groups, size) % min(groups, size):
            reason = f"{groups} query groups and {size}: neither divides the other"
        if reason:
            left_out[f"tensor parallel {size}"] = reason
        else:
            found.append(size)
    return found


def _context_sizes(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    found = []
    for size in sorted({*_powers(min(request.num_ranks, _MAX_CONTEXT)), request.context_size}):
        tokens = request.sequence_length // size
        if request.num_ranks % size:
            left_out[f"context parallel {size}"] = f"{request.num_ranks} ranks are not a multiple of it"
        elif size > 1 and request.sequence_length % (2 * size):
            left_out[f"context parallel {size}"] = _indivisible(request.sequence_length, 2 * size)
        elif size > 1 and tokens < MINIMUM_CONTEXT_TOKENS and size != request.context_size:
            left_out[f"context parallel {size}"] = (
                f"a sequence of {request.sequence_length} leaves {tokens} tokens per rank, below "
                f"{MINIMUM_CONTEXT_TOKENS}; give --context-parallel-size {size} to have it searched"
            )
        else:
            found.append(size)
    return found


def _expert_sizes(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    if not request.num_experts:
        left_out["expert parallel"] = "the model has no experts"
        return [1]
    return [size for size in _powers(min(request.num_experts, request.num_ranks)) if request.num_experts % size == 0]


def _micro_batches(request: TuningRequest, left_out: dict[str, str]) -> list[int]:
    found = []
    for size in sorted({*_MICRO_BATCHES, request.micro_batch_size}):
        if request.global_batch_size % size:
            left_out[f"micro batch {size}"] = _indivisible(request.global_batch_size, size)
        else:
            found.append(size)
    return found
