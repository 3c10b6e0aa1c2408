"""From the grids of a batch of images to rows: order, attention boundaries, windows and rotary angles.

Rows of one image are ordered by frame, and inside a frame by groups of merge x merge patches (the projector joins
consecutive rows). With windows the groups are sorted by window; ``merged_order`` restores the order of the merged rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference_vlm.configuration import VisionDescription

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class GridRows:
    """``order [patches]``, ``merged_order [groups]``: index tensors; ``boundaries``, ``windows``: cumulative rows;
    ``angles [patches, 1, 1, head size]``."""

    order: torch.Tensor
    merged_order: torch.Tensor
    boundaries: list[int]
    windows: list[int] | None
    angles: torch.Tensor


def lay_out_rows(grids: Sequence[Sequence[int]], vision: VisionDescription, device: torch.device) -> GridRows:
    """Order the rows of ``grids``, (frames, height, width) of every image in patches."""
    merge = vision.spatial_merge_size
    boundaries = [0]
    for frames, height, width in grids:
        boundaries += [boundaries[-1] + height * width * (frame + 1) for frame in range(frames)]
    positions = torch.cat([_positions(frames, height, width, merge) for frames, height, width in grids]).to(device)
    num_groups = boundaries[-1] // merge**2
    groups, windows = torch.arange(num_groups), None
    if vision.window_size:
        groups, windows = _windows(grids, merge, vision.window_size // merge // vision.patch_size)
    order = (groups[:, None] * merge**2 + torch.arange(merge**2)).flatten().to(device)
    quarter = vision.stack.kv_channels // 4
    exponents = torch.arange(quarter, dtype=torch.float32, device=device) / quarter
    halves = (positions[order].float()[:, :, None] * ROTARY_BASE**-exponents).flatten(1)
    return GridRows(
        order=order,
        merged_order=torch.argsort(groups).to(device),
        boundaries=boundaries,
        windows=windows,
        angles=torch.cat((halves, halves), dim=1)[:, None, None, :],
    )


def _positions(frames: int, height: int, width: int, merge: int) -> torch.Tensor:
    """Return ``[frames * height * width, 2]``: row and column of every patch, in the order of the rows."""
    shape = (height // merge, merge, width // merge, merge)
    rows = torch.arange(height)[:, None].expand(height, width).reshape(shape).transpose(1, 2).flatten()
    columns = torch.arange(width)[None, :].expand(height, width).reshape(shape).transpose(1, 2).flatten()
    return torch.stack((rows, columns), dim=1).repeat(frames, 1)


def _windows(grids: Sequence[Sequence[int]], merge: int, side: int) -> tuple[torch.Tensor, list[int]]:
    """Return groups sorted by window (``side`` x ``side``, smaller at the edges) and cumulative rows of the windows."""
    order: list[torch.Tensor] = []
    boundaries, start = [0], 0
    for frames, height, width in grids:
        index = torch.arange(frames * (height // merge) * (width // merge)).view(
            frames, height // merge, width // merge
        )
        for frame in index:
            for strip in frame.split(side, dim=0):
                for window in strip.split(side, dim=1):
                    order.append(window.flatten() + start)
                    boundaries.append(boundaries[-1] + window.numel() * merge**2)
        start += index.numel()
    return torch.cat(order), boundaries
