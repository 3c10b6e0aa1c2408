"""Tokens routed to experts evenly, in traces and measurements alike."""

from __future__ import annotations

import functools
from typing import Any

from mindspeed_autoparallel.patching import call_after_import


def balance_routing() -> None:
    """Give every expert the same number of tokens; an untrained router would make times and memory arbitrary."""
    call_after_import("megatron.core.transformer.moe.router", _balance_router)


def balanced_map(num_tokens: int, num_experts: int, topk: int) -> Any:
    """Return ``[num_tokens, num_experts]`` bool: token ``i`` goes to experts ``i topk, i topk + 1, ...`` (wrapping)."""
    import torch

    chosen = (torch.arange(num_tokens * topk) % num_experts).reshape(num_tokens, topk)
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)


def _balance_router(module: Any) -> None:
    from mindspeed_autoparallel.runtime.profiling.trace.tensor_shapes import really

    routing = module.TopKRouter.routing

    @functools.wraps(routing)
    def balanced(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routed = routing(self, *args, **kwargs)
        if self.config.moe_expert_capacity_factor is not None:
            return probs, routed
        with really():
            chosen = balanced_map(routed.shape[0], routed.shape[1], self.topk).to(routed.device)
        return probs, chosen

    module.TopKRouter.routing = balanced
