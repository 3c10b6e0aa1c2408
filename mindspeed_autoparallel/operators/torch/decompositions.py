"""Rewrites exported programs to operators with rules: mutations and unknown composites go, gradient stops stay."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mindspeed_autoparallel.operators.torch.rules.table import rule_of


@torch.library.custom_op("mindspeed_autoparallel::stop_gradient", mutates_args=())
def _stop_gradient(value: torch.Tensor) -> torch.Tensor:
    """Stands for ``detach`` and ``no_grad`` during a rewrite, which would drop both."""
    return value.clone()


@_stop_gradient.register_fake
def _(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


def short_name(target: Any) -> str:
    """Return the operator's name without namespace and overload."""
    name = getattr(target, "_schema", None)
    return str(name.name).split("::")[-1] if name is not None else getattr(target, "__name__", str(target))


def simplified(program: Any, *, few: bool = False) -> Any:
    """Return ``program``, rewritten if it mutates tensors or has an operator without a rule; a rewrite traces it anew.

    With ``few``, for a program rewritten before, operators without a rule stay as they are; only in-place changes of
    tensors are rewritten.
    """
    if not _needs_rewriting(program.graph):
        return program
    if not few:  # a second pass would add them twice
        _mark_stops(program.graph_module)
    known = {} if few else dict(_without_a_rule())  # torch takes entries out of what it gets
    known[torch.ops.aten._native_batch_norm_legit_functional.default] = batch_norm_in_training
    return program.run_decompositions(known)


@functools.cache
def _without_a_rule() -> dict[Any, Any]:
    """Return torch's decompositions of operators that have no rule; torch lists all its operators each time."""
    return {
        target: function
        for target, function in torch.export.default_decompositions().items()
        if rule_of(short_name(target), torch.Tag.pointwise in target.tags) is None
        and not short_name(target).startswith("linalg_")  # these end in factorisations, which have no rule
    }


def _needs_rewriting(graph: Any) -> bool:
    for node in graph.nodes:
        if node.op != "call_function" or node.target.__name__ == "getitem":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            return True  # a region without gradients, or of another precision
        is_pointwise = torch.Tag.pointwise in node.target.tags
        if node.target._schema.is_mutable or rule_of(short_name(node.target), is_pointwise) is None:
            return True
    return False


def _mark_stops(module: Any) -> None:
    """Insert ``stop_gradient`` after every ``detach`` and every result of a region without gradients."""
    stop = torch.ops.mindspeed_autoparallel.stop_gradient.default
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        region = node.args[0] if node.target.__name__ == "getitem" and isinstance(node.args[0], torch.fx.Node) else None
        ends_region = (
            region is not None
            and getattr(region.target, "__name__", "") == "wrap_with_set_grad_enabled"
            and region.args[0] is False
        )
        if not ends_region and short_name(node.target) not in ("detach", "detach_"):
            if getattr(node.target, "__name__", "") == "wrap_with_autocast":
                _mark_stops(getattr(module, str(node.args[4].target)))
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            with module.graph.inserting_after(node):
                marked = module.graph.call_function(stop, (node,))
            marked.meta = dict(node.meta)
            node.replace_all_uses_with(marked, delete_user_cb=lambda user, marked=marked: user is not marked)
    module.recompile()


def batch_norm_in_training(
    given: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Compute batch norm by sums over all dims but the channel: samples may be cut, and pending sums are all-reduced.

    Returns the output, the two saved statistics and the two running ones.
    """
    if not training:
        made = torch.ops.aten._native_batch_norm_legit_no_training.default(
            given, weight, bias, running_mean, running_var, momentum, eps
        )
        return (*made, running_mean, running_var)
    dims = [d for d in range(given.dim()) if d != 1]
    number = given.numel() // given.shape[1]
    mean = given.sum(dims, keepdim=True) / number
    centred = given - mean
    variance = (centred * centred).sum(dims, keepdim=True) / number
    inverse = torch.rsqrt(variance + eps)
    result = centred * inverse
    view = [1, -1, *(1 for _ in dims[1:])]
    if weight is not None:
        result = result * weight.view(view)
    if bias is not None:
        result = result + bias.view(view)
    flat_mean, flat_variance = mean.view(-1), variance.view(-1)
    unbiased = flat_variance * (number / max(1, number - 1))
    kept = running_mean * (1 - momentum) + flat_mean.detach() * momentum
    spread = running_var * (1 - momentum) + unbiased.detach() * momentum
    # As in the operator itself, no gradient flows through the saved statistics.
    return result, flat_mean.detach(), inverse.view(-1).detach(), kept, spread
