"""A picture of any size -> normalised patches in the order of the image encoder (the same as in Qwen2-VL)."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

from mindspeed_autoparallel.data.media import fitting_size
from mindspeed_autoparallel.errors import ConfigError
from reference_vlm.configuration import VisionDescription

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def load_picture(
    path: Path, vision: VisionDescription, min_pixels: int, max_pixels: int
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Return patches ``[patches, channels * time * patch * patch]`` and the grid (1, height, width) in patches."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the image {path}: {error}.") from error
    factor = vision.patch_size * vision.spatial_merge_size
    height, width = fitting_size(picture.height, picture.width, factor, min_pixels, max_pixels)
    if (picture.height, picture.width) != (height, width):
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255.0)
    normalised = ((pixels - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(2, 0, 1)
    return cut_patches(normalised, vision)


def cut_patches(pixels: torch.Tensor, vision: VisionDescription) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Cut ``pixels [channels, height, width]`` into patches grouped by merge x merge; a still picture fills every
    frame."""
    patch, merge = vision.patch_size, vision.spatial_merge_size
    channels, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    cells = pixels.view(channels, rows // merge, merge, patch, columns // merge, merge, patch)
    cells = cells.permute(1, 4, 2, 5, 0, 3, 6)[..., None, :, :]
    cells = cells.expand(-1, -1, -1, -1, -1, vision.temporal_patch_size, -1, -1)
    return cells.reshape(rows * columns, -1).contiguous(), (1, rows, columns)
