"""The state-space scan of Mamba 2, and the same with its convolution in front."""

import torch
from torch.nn import functional


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False, **unused
):
    """``x`` [batch, length, heads, width], ``dt`` [batch, length, heads], ``B`` and ``C`` [batch, length, groups, state]."""
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = functional.softplus(dt)
    repeats = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeats, 2), C.repeat_interleave(repeats, 2)
    # Every token reads every one before it, in place of a state that runs over tokens.
    sums = (dt * A).cumsum(1).transpose(1, 2)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(~later, float("-inf")).exp()
    read = torch.einsum("blhn,bshn->bhls", C, B) * decay
    y = torch.einsum("bhls,bshp->blhp", read, dt[..., None] * x)
    if D is not None:
        y = y + x * (D[:, None] if D.dim() == 1 else D)
    return y if z is None else y * functional.silu(z)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, headdim=None, ngroups=1, **unused
):
    """``zxbcdt`` [batch, length, 2 * inner + 2 * groups * state + heads]; returns [batch, length, inner]."""
    heads, width = dt_bias.shape[0], headdim or D.shape[-1]
    inner = heads * width
    states = conv1d_weight.shape[0] - inner
    z, mixed, dt = zxbcdt.split([inner, inner + states, heads], -1)
    size = conv1d_weight.shape[1]
    padded = functional.pad(mixed.transpose(1, 2), (size - 1, 0))
    mixed = functional.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=inner + states)
    x, B, C = functional.silu(mixed.transpose(1, 2)).split([inner, states // 2, states // 2], -1)
    split = (ngroups, -1)
    gate = z.unflatten(-1, (heads, width))
    rows = x.unflatten(-1, (heads, width))
    B, C = B.unflatten(-1, split), C.unflatten(-1, split)
    return mamba_chunk_scan_combined(
        rows, dt, A, B, C, chunk_size, D=D, z=gate, dt_bias=dt_bias, dt_softplus=True
    ).flatten(-2)
