"""The sizes of one sample, which determine its work and memory."""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""A numpy array."""


class SampleSize(NamedTuple):
    """Counts of one sample. Attention in an encoder is limited to one picture or clip, hence the sums of squares."""

    tokens: int
    """Tokens of the text decoder, including those of pictures and audio."""
    images: int = 0
    patches: int = 0
    """Rows of the image encoder, all pictures together."""
    squared_patches: int = 0
    """Sum over the pictures of patches squared."""
    clips: int = 0
    """Audio clips."""
    frames: int = 0
    """Mel frames of all clips."""
    squared_frames: int = 0


COLUMNS = SampleSize._fields
SHOWN_COLUMNS = ("tokens", "images", "patches", "clips", "frames")
"""Displayed columns; the squares follow from them."""
