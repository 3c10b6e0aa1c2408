"""What is redistributed: images and audio clips, and ranges of their rows."""

from __future__ import annotations

from dataclasses import dataclass

Rows = tuple[int, int]
"""``[start, stop)``"""


@dataclass(frozen=True)
class Item:
    """Describe one image or audio clip as far as the plan must know it, the same on every rank."""

    dp_replica: int
    """Data-parallel replica of the backbone whose microbatch holds the sample."""
    microbatch: int
    sample: int
    input_rows: int
    output_rows: int
    cost: float
    meta: tuple[int, ...] = ()
    """Small integers the encoder needs beside the rows, e.g. (frames, height, width) in patches."""
    first_token: int | None = None
    """Place in the sample's sequence of the first output row, when the rows lie there one after another."""
    num_tokens: int = 0
    """Length of the sample's padded sequence."""
