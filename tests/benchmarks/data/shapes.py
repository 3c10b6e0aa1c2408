"""Three shapes of data, drawn with fixed seeds: named for what they resemble, not taken from any set."""

from __future__ import annotations

from typing import Any

import numpy

from mindspeed_autoparallel.data.work import COLUMNS

Array = Any
MERGE = 4


def _sizes(number: int, **columns: Array) -> Array:
    sizes = numpy.zeros((number, len(COLUMNS)), dtype=numpy.int64)
    for name, values in columns.items():
        sizes[:, COLUMNS.index(name)] = values
    return sizes


def instruct(number: int, seed: int) -> Array:
    """Multimodal instructions: 0 to 4 pictures of 256 to 4,900 patches, answers of some 200 tokens; 8,192 at most."""
    draw = numpy.random.default_rng(seed)
    images = draw.choice([0, 1, 2, 4], number, p=[0.2, 0.6, 0.15, 0.05])
    patches, squares = numpy.zeros(number, int), numpy.zeros(number, int)
    for place in range(4):
        one = numpy.where(images > place, MERGE * numpy.clip(draw.lognormal(5.6, 0.7, number), 64, 1225).astype(int), 0)
        patches, squares = patches + one, squares + one**2
    text = numpy.clip(draw.lognormal(5.2, 0.8, number), 16, 3000).astype(int)
    tokens = numpy.minimum(text + patches // MERGE + 2 * images, 8192)
    return _sizes(number, tokens=tokens, images=images, patches=patches, squared_patches=squares)


def text(number: int, seed: int) -> Array:
    """Long-tail text: median 600 tokens, one in a hundred beyond 10,000, cut at 16,384."""
    draw = numpy.random.default_rng(seed)
    return _sizes(number, tokens=numpy.clip(draw.lognormal(6.4, 1.2, number), 16, 16384).astype(int))


def video(number: int, seed: int) -> Array:
    """Video: 4 to 64 frames of 256 to 576 patches each (attention within a frame), 32,768 tokens at most."""
    draw = numpy.random.default_rng(seed)
    frames = numpy.clip(draw.lognormal(2.8, 0.8, number), 4, 64).astype(int)
    each = draw.choice([256, 400, 576], number)
    tokens = numpy.minimum(frames * each // MERGE + draw.integers(50, 400, number), 32768)
    return _sizes(number, tokens=tokens, images=frames, patches=frames * each, squared_patches=frames * each**2)


SHAPES = {"instruct": instruct, "text": text, "video": video}
