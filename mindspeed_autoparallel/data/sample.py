"""The sizes of one sample: all that its work and its memory depend on."""

from __future__ import annotations

from typing import NamedTuple


class SampleSize(NamedTuple):
    """Counts of one sample. Attention inside an encoder stays within one picture or clip: hence the sums of squares."""

    tokens: int
    """In the text decoder, those of pictures and audio included."""
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
"""Columns for people; the squares follow from them."""
