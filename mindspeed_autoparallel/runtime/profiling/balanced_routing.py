"""Routes tokens to experts evenly, in traces and in measurements."""

from __future__ import annotations

import functools
from typing import Any

from mindspeed_autoparallel.patching import call_after_import

_NATIVE_DISPATCHER = "mindspeed_mm.fsdp.distributed.expert_parallel.ep_dispatcher"


def balance_routing(imbalance: float = 1.0) -> None:
    """Route the same number of tokens to every expert; an untrained router would make times and memory arbitrary.

    ``imbalance``: tokens that this rank's experts receive, relative to an even share, if experts are split. In
    MindSpeed-MM's native trainer only split experts are balanced; if a rank has all experts, the model's own routing
    remains.
    """
    call_after_import("megatron.core.transformer.moe.router", functools.partial(_balance_router, imbalance=imbalance))
    call_after_import(_NATIVE_DISPATCHER, functools.partial(_balance_dispatcher, imbalance=imbalance))


def balanced_map(num_tokens: int, num_experts: int, topk: int) -> Any:
    """Return ``[num_tokens, num_experts]`` bool: token ``i`` goes to experts ``i topk, i topk + 1, ...`` (wrapping)."""
    return _map_of(_choice(num_tokens, num_experts, topk, (0, num_experts), 1.0), num_experts)


def _choice(num_tokens: int, num_experts: int, topk: int, own: tuple[int, int], ratio: float) -> Any:
    """Return the experts of every token, ``[num_tokens, topk]``: an even choice, or one that gives the experts ``own``
    (first, count) ``ratio`` times an even share, within the limit of ``topk`` different experts for each token."""
    import torch

    first, count = own
    if ratio <= 1 or count >= num_experts:
        return (torch.arange(num_tokens * topk) % num_experts).reshape(num_tokens, topk)
    others = num_experts - count
    wanted = round(ratio * num_tokens * topk * count / num_experts)
    tokens = torch.arange(num_tokens + 1)
    picks = (tokens * wanted // num_tokens).diff().clamp(min=max(0, topk - others), max=min(topk, count))
    rest = topk - picks
    place = torch.arange(topk)
    starts, rest_starts = picks.cumsum(0) - picks, rest.cumsum(0) - rest
    favoured = first + (starts[:, None] + place) % count
    other = (rest_starts[:, None] + place - picks[:, None]) % max(1, others)
    other = torch.where(other < first, other, other + count)
    return torch.where(place < picks[:, None], favoured, other)


def _map_of(chosen: Any, num_experts: int) -> Any:
    import torch

    return torch.zeros(chosen.shape[0], num_experts, dtype=torch.bool).scatter_(1, chosen, True)


def _own_experts(num_experts: int) -> tuple[int, int]:
    """Return the first of this rank's experts, and their number."""
    from megatron.core import parallel_state

    count = num_experts // parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * count, count


def _own_native_experts(num_experts: int) -> tuple[int, int]:
    """Return the result of ``_own_experts`` in MindSpeed-MM's native trainer."""
    from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state

    state = get_parallel_state()
    count = num_experts // state.get_group_size("ep")
    return state.get_rank("ep") * count, count


def _balance_router(module: Any, imbalance: float = 1.0) -> None:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    routing = module.TopKRouter.routing

    @functools.wraps(routing)
    def balanced(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routed = routing(self, *args, **kwargs)
        if self.config.moe_expert_capacity_factor is not None:
            return probs, routed
        with unset_fake_temporarily():
            tokens, experts = routed.shape
            chosen = _choice(tokens, experts, self.topk, _own_experts(experts), imbalance)
            chosen = _map_of(chosen, experts).to(routed.device)
        return probs, chosen

    module.TopKRouter.routing = balanced


def _balance_dispatcher(module: Any, imbalance: float = 1.0) -> None:
    """Enable the balanced routing that MindSpeed-MM's native dispatchers have for debugging, with ``imbalance``."""
    if not hasattr(module, "force_ep_balance"):
        print(
            "mindspeed_autoparallel: this release of MindSpeed-MM has no MM_FORCE_EP_BALANCE; tokens are routed to "
            "experts by the model's own router, which has arbitrary values on a rank that runs alone",
            flush=True,
        )
        return

    def chosen(num_experts: int, selected_experts: Any) -> Any:
        tokens, topk = selected_experts.shape
        found = _choice(tokens, num_experts, topk, _own_native_experts(num_experts), imbalance)
        return found.to(selected_experts)

    module.FORCE_EP_BALANCE, module.force_ep_balance = True, chosen
