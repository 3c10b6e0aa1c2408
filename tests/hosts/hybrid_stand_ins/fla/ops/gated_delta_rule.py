"""The gated delta rule, one token after the other."""

import torch


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, **unused):
    """``q`` and ``k`` [batch, length, heads, key], ``v`` [batch, length, heads, value], ``g`` and ``beta`` [batch,
    length, heads]; returns [batch, length, heads, value] and no state."""
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for token in range(v.shape[1]):
        state = state * g[:, token, :, None, None].exp()
        key = k[:, token, :, :, None]
        missing = v[:, token] - (state * key).sum(-2)
        state = state + key * (beta[:, token, :, None] * missing)[:, :, None]
        outputs.append((state * q[:, token, :, :, None]).sum(-2))
    return torch.stack(outputs, 1), None
