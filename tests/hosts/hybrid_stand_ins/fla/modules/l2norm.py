"""Normalization of the last dimension to length one."""

import torch


def l2norm(x, eps=1e-6, output_dtype=None):
    """``x`` [..., width]."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
