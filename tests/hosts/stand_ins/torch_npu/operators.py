"""The fused operators of torch_npu that hosts train through, in plain torch; each with the arguments hosts pass."""

import math
from typing import Any

import torch
import torch.nn.functional as functional

__all__ = [
    "npu_apply_adam_w",
    "npu_confusion_transpose",
    "npu_fast_gelu",
    "npu_format_cast",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_gelu",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_rotary_position_embedding",
    "npu_scaled_masked_softmax",
    "npu_swiglu",
]

_CAUSAL_MODES = (2, 3)
"""``sparse_mode`` of attention under a lower triangle: from the left upper, and from the right lower corner."""


def npu_rms_norm(x: Any, gamma: Any, epsilon: float = 1e-6) -> tuple[Any, Any]:
    """Normalise the last axis in fp32; the result in the type of ``x``, and the reciprocal root mean square."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal).to(x.dtype) * gamma, reciprocal


def npu_swiglu(x: Any, dim: int = -1) -> Any:
    """Gate the second half of axis ``dim`` by SiLU of the first."""
    gate, value = x.chunk(2, dim)
    return functional.silu(gate) * value


def npu_gelu(x: Any, approximate: str = "none") -> Any:
    """GELU."""
    return functional.gelu(x, approximate=approximate)


def npu_fast_gelu(x: Any) -> Any:
    """GELU by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def npu_rotary_mul(x: Any, cos: Any, sin: Any, rotary_mode: str = "half") -> Any:
    """Rotate pairs of the last axis: its halves, or (``interleave``) neighbours."""
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * cos + turned * sin).to(x.dtype)


def npu_rotary_position_embedding(x: Any, cos: Any, sin: Any, mode: int = 0) -> Any:
    """``npu_rotary_mul`` with the mode as a number: 0 halves, 1 neighbours."""
    return npu_rotary_mul(x, cos, sin, "interleave" if mode == 1 else "half")


def npu_scaled_masked_softmax(x: Any, mask: Any, scale: float = 1.0, fixed_triu_mask: bool = False) -> Any:
    """Softmax of ``scale * x`` in fp32, where ``mask`` is true of nothing."""
    scores = x.float() * scale
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    if mask is not None and mask.numel():
        scores = scores.masked_fill(mask.bool(), -10000.0)
    return scores.softmax(-1).to(x.dtype)


def npu_confusion_transpose(x: Any, perm: Any, shape: Any, transpose_first: bool) -> Any:
    """Permute then reshape, or the other way round."""
    return x.permute(perm).reshape(shape) if transpose_first else x.reshape(shape).permute(perm)


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Any,
    max_grad_norm: Any = None,
    amsgrad: bool = False,
    maximize: bool = False,
    *,
    out: tuple[Any, Any, Any],
) -> tuple[Any, Any, Any]:
    """Update parameter and both moments (``out``) in place by AdamW. Powers are those of the step before."""
    if amsgrad:
        raise NotImplementedError("the stand-in AdamW has no amsgrad")
    parameter, first, second = out
    grad = -grad if maximize else grad
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (second / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
    parameter.mul_(1 - lr * weight_decay).addcdiv_(first, root, value=-lr / (1 - beta1_power * beta1))
    return out


def npu_format_cast(x: Any, *formats: Any) -> Any:
    """Keep the tensor: formats are the NPU's own."""
    return x


def npu_moe_token_permute(
    tokens: Any, indices: Any, num_out_tokens: int | None = None, padded_mode: bool = False
) -> Any:
    """Sort copies of ``tokens`` [tokens, hidden] by expert; and where each copy came from, as the inverse wants it."""
    copies = indices.shape[1] if indices.dim() > 1 else 1
    order = torch.argsort(indices.flatten(), stable=True)
    kept = order if not num_out_tokens else order[:num_out_tokens]
    return tokens.index_select(0, kept // copies), order.to(torch.int32)


def npu_moe_token_unpermute(
    permuted: Any, order: Any, probs: Any = None, padded_mode: bool = False, restore_shape: Any = None
) -> Any:
    """Undo ``npu_moe_token_permute``: the copies of a token are added up, weighted by ``probs`` [tokens, copies]."""
    copies = 1 if probs is None else probs.shape[1]
    back = permuted.new_zeros(order.numel(), permuted.shape[-1])
    back = back.index_copy(0, order[: permuted.shape[0]].long(), permuted)
    back = back.unflatten(0, (-1, copies))
    if probs is not None:
        back = back * probs.unsqueeze(-1)
    return back.sum(1).to(permuted.dtype)


def npu_fusion_attention(
    query: Any, key: Any, value: Any, head_num: int, input_layout: str, **settings: Any
) -> tuple[Any, ...]:
    """Attention in one of torch_npu's layouts (SBH, BSH, BSND, BNSD, TND); the output first, as the operator has it.

    ``settings``: ``atten_mask`` (true where nothing may be seen), ``scale``, ``sparse_mode``, ``next_tockens``, ``pse``
    (added to the products in front of ``scale``) and, for TND, ``actual_seq_qlen`` and ``actual_seq_kvlen`` (running
    totals). Dropout is refused.
    """
    bias = settings.get("pse")
    if settings.get("keep_prob", 1.0) != 1.0:
        raise NotImplementedError("the stand-in attention has no dropout")
    mask, causal = _mask(settings)
    scale, unused = settings.get("scale", 1.0), torch.zeros(1)
    if input_layout == "TND":
        if bias is not None:
            raise NotImplementedError("the stand-in attention of packed sequences has no position bias")
        return _packed(query, key, value, scale, causal, settings), unused, unused, unused, 0, 0, 0
    size = query.shape[-1] // head_num if input_layout in ("SBH", "BSH") else query.shape[-1]
    heads = [_heads_first(tensor, input_layout, size) for tensor in (query, key, value)]
    output = _heads_back(_attention(*heads, scale, mask, causal, bias), input_layout)
    scores = _scores(*(tensor.detach() for tensor in heads[:2]), scale, mask, causal, bias)
    most = scores.amax(-1, keepdim=True)
    return output, *_eightfold(most, (scores - most).exp().sum(-1, keepdim=True)), unused, 0, 0, 0


def npu_fusion_attention_grad(
    query: Any, key: Any, value: Any, gradient: Any, head_num: int, input_layout: str, **settings: Any
) -> tuple[Any, ...]:
    """Gradients of query, key and value, from the ``softmax_max`` and ``softmax_sum`` [batch, heads, tokens, 8] of all keys.

    ``attention_in``: the output over all keys, of which ``key`` and ``value`` may be a part (ring attention).
    """
    mask, causal = _mask(settings)
    scale = settings.get("scale_value", 1.0)
    size = query.shape[-1] // head_num if input_layout in ("SBH", "BSH") else query.shape[-1]
    given = (query, key, value, gradient, settings["attention_in"])
    queries, keys, values, gradients, outputs = (_heads_first(one, input_layout, size).float() for one in given)
    group = queries.shape[1] // keys.shape[1]
    most, total = settings["softmax_max"][..., :1], settings["softmax_sum"][..., :1]
    shares = (_scores(queries, keys, scale, mask, causal) - most).exp() / total
    of_shares = gradients @ values.repeat_interleave(group, 1).transpose(-1, -2)
    of_scores = shares * (of_shares - (gradients * outputs).sum(-1, keepdim=True)) * scale
    found = (
        of_scores @ keys.repeat_interleave(group, 1),
        (of_scores.transpose(-1, -2) @ queries).unflatten(1, (-1, group)).sum(2),
        (shares.transpose(-1, -2) @ gradients).unflatten(1, (-1, group)).sum(2),
    )
    return (*(_heads_back(one, input_layout).to(query.dtype) for one in found), None)


def _mask(settings: Any) -> tuple[Any, bool]:
    """Return the mask to apply, and whether a lower triangle stands in for it."""
    mode, mask = settings.get("sparse_mode", 0), settings.get("atten_mask")
    causal = mode in _CAUSAL_MODES or (mode == 0 and mask is None and settings.get("next_tockens", 1) == 0)
    return None if causal else mask, causal


def _eightfold(*statistics: Any) -> list[Any]:
    """Return statistics of rows as the operator has them: eight times."""
    return [one.expand(*one.shape[:-1], 8).contiguous() for one in statistics]


def _packed(query: Any, key: Any, value: Any, scale: float, causal: bool, settings: Any) -> Any:
    """Attention of sequences laid end to end [tokens, heads, size]."""
    parts, start, key_start = [], 0, 0
    for end, key_end in zip(settings["actual_seq_qlen"], settings["actual_seq_kvlen"], strict=True):
        own = query[start:end], key[key_start:key_end], value[key_start:key_end]
        part = _attention(*(tensor.transpose(0, 1)[None] for tensor in own), scale, None, causal)
        parts.append(part[0].transpose(0, 1))
        start, key_start = int(end), int(key_end)
    return torch.cat(parts)


def _attention(query: Any, key: Any, value: Any, scale: float, mask: Any, causal: bool, bias: Any = None) -> Any:
    """Plain attention over [batch, heads, tokens, size] in fp32; key and value heads are repeated for their group."""
    value = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (_scores(query, key, scale, mask, causal, bias).softmax(-1) @ value.float()).to(value.dtype)


def _scores(query: Any, key: Any, scale: float, mask: Any, causal: bool, bias: Any = None) -> Any:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.float() @ key.float().transpose(-1, -2)
    scores = (scores if bias is None else scores + bias.float()) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows)
    if mask is not None:
        scores = scores.masked_fill(mask.bool(), -math.inf if causal else -1e9)
    return scores


def _heads_first(tensor: Any, layout: str, size: int) -> Any:
    """To [batch, heads, tokens, size]."""
    if layout == "SBH":
        return tensor.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)
    if layout == "BSH":
        return tensor.unflatten(-1, (-1, size)).transpose(1, 2)
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def _heads_back(tensor: Any, layout: str) -> Any:
    """From [batch, heads, tokens, size]."""
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(-2)
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(-2)
    return tensor.transpose(1, 2) if layout == "BSND" else tensor
