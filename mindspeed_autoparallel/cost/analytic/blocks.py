"""Blocks other than decoder layers, as lists of operators: audio towers, and diffusion's two streams.

Parameters, operations, time and the bytes that torch saves follow from the list. Sizes are those of one sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_autoparallel.cost.analytic.kernels import NOTHING, Times, linear_us, memory_pass_us
from mindspeed_autoparallel.cost.device import Device, Efficiency

_SIZE = 2
"""Bytes of an element in the training precision."""
_LAYER_KERNELS = 25
"""Number of kernels that ``Efficiency.launch_us`` covers: a layer of attention and a dense MLP."""
_NORM_COPY, _WEIGHTED_NORM = 4, 8
"""Bytes per element that a norm in fp32 saves: its input, and with a weight what it multiplies (torch's ``rms_norm``
if no kernel fuses it, as up to 2.8)."""


class Product(NamedTuple):
    """A linear layer: ``[rows, inputs] x [inputs, outputs]``."""

    rows: int
    inputs: int
    outputs: int
    bias: bool = True


class Scores(NamedTuple):
    """Fused attention of ``queries`` over ``keys``; ``width``: all heads together."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """The work and saved bytes of one forward pass of one sample."""

    products: tuple[Product, ...] = ()
    scores: tuple[Scores, ...] = ()
    passed_bytes: float = 0.0
    """Bytes read and written by other kernels, forward."""
    kernels: int = 0
    """Number of kernels launched forward."""
    weights: int = 0
    """Parameters outside the products."""
    saved_bytes: float = 0.0
    """Bytes saved for backward, without the block's inputs."""
    widest: int = 0
    """Elements of the widest gradient."""

    @property
    def parameters(self) -> int:
        held = sum(one.inputs * one.outputs + one.bias * one.outputs for one in self.products)
        return held + self.weights

    @property
    def operations(self) -> float:
        """Return the floating-point operations of products and attention, forward."""
        products = sum(2.0 * one.rows * one.inputs * one.outputs for one in self.products)
        return products + sum(4.0 * one.queries * one.keys * one.width for one in self.scores)

    def times(self, device: Device, efficiency: Efficiency, samples: int) -> Times:
        """Return the times of forward, input gradient and weight gradient of ``samples``."""
        parts = NOTHING
        for one in self.products:
            parts = parts.plus(linear_us(device, efficiency, samples * one.rows, one.inputs, one.outputs))
        speed = device.peak_tflops * 1e6 * efficiency.attention_fraction
        for score in self.scores:
            operations = 4.0 * samples * score.queries * score.keys * score.width
            parts = parts.plus(Times(operations / speed, 2.5 * operations / speed))
        beside = memory_pass_us(device, efficiency, samples * self.passed_bytes)
        parts = parts.plus(Times(beside, 2 * beside))
        host = efficiency.launch_us * self.kernels / _LAYER_KERNELS
        return Times(max(parts.forward_us, host), max(parts.input_gradient_us, 2 * host), parts.weight_gradient_us)


def joined(blocks: Iterable[Block]) -> Block:
    """Return the block that runs all of ``blocks``, one after another."""
    rows = list(blocks)
    return Block(
        products=tuple(one for block in rows for one in block.products),
        scores=tuple(one for block in rows for one in block.scores),
        passed_bytes=sum(block.passed_bytes for block in rows),
        kernels=sum(block.kernels for block in rows),
        weights=sum(block.weights for block in rows),
        saved_bytes=sum(block.saved_bytes for block in rows),
        widest=max((block.widest for block in rows), default=0),
    )


def mlp_block(rows: int, *widths: int, kept: int = 2) -> Block:
    """Return linear layers of ``widths``, activation functions between them; ``saved_bytes`` excludes the input.

    ``kept``: tensors saved per activation function, its result included, which the next layer reads: 1 for ReLU, whose
    gradient follows from its result.
    """
    products = tuple(Product(rows, one, other) for one, other in itertools.pairwise(widths))
    between = rows * sum(widths[1:-1])
    return Block(
        products=products,
        passed_bytes=2 * _SIZE * between,
        kernels=2 * len(products) - 1,
        saved_bytes=kept * _SIZE * between,
        widest=rows * max(widths),
    )


def encoder_block(rows: int, widths: tuple[int, int], heads: int, ffn: int, memory: int = 0) -> Block:
    """Return a layer of Fun-ASR's SAN-M encoder, and with ``memory`` 0 of its adaptor.

    It has norms with bias, attention over all positions, a convolution of ``memory`` positions per channel on the
    values, and an MLP with ReLU.

    ``widths``: of the input and of the output. Source: funasr's ``MultiHeadedAttentionSANM`` and
    ``PositionwiseFeedForward`` (1.4), and transformers' ``FunAsrNanoEncoderLayer``.
    """
    inputs, width = widths
    projections = (Product(rows, inputs, 3 * width), Product(rows, width, width))
    attention = Block(
        products=projections,
        scores=(Scores(rows, rows, width),),
        passed_bytes=_SIZE * rows * (2 * inputs + 3 * width + (6 * width if memory else 0)),
        kernels=6 + 5 * bool(memory),
        weights=2 * inputs + 2 * width + memory * width,
        # Both norms' results and the second's input, queries, keys, values and the output; what is convolved with its
        # margins; attention's sums in fp32, and two numbers of each norm and row.
        saved_bytes=_SIZE * (rows * (inputs + 6 * width + 4) + (width * (rows + memory - 1) if memory else 0))
        + 4 * heads * rows,
        widest=rows * 3 * width,
    )
    return joined((attention, mlp_block(rows, width, ffn, width, kept=1)))


class Stream(NamedTuple):
    """One modality of LTX-2: tokens of a sample, heads and their width, and the text that it reads."""

    tokens: int
    heads: int
    head_size: int
    text_tokens: int
    text_width: int

    @property
    def width(self) -> int:
        """Return the hidden state's width."""
        return self.heads * self.head_size


def _ltx_attention(queries: tuple[int, int], keys: tuple[int, int], heads: int, width: int, *, rotated: bool) -> Block:
    """Return attention of rows of one width on rows of another: weighted norms of queries and keys over all heads,
    rotation, and the output's projection (``Attention`` of ``ltx_core``)."""
    (rows, inputs), (others, context) = queries, keys
    products = (Product(rows, inputs, width), Product(others, context, width), Product(others, context, width))
    turned = (rows + others) * width
    saved = turned * (_WEIGHTED_NORM + 2 * _SIZE) + 4 * (rows + others) + 4 * heads * rows
    return Block(
        products=(*products, Product(rows, width, inputs)),
        scores=(Scores(rows, others, width),),
        passed_bytes=turned * (12 + (6 * _SIZE if rotated else 0)),
        kernels=15 + 12 * rotated,
        weights=2 * width,
        saved_bytes=saved + (turned * _SIZE // 2 if rotated else 0),
        widest=max(rows, others) * max(width, inputs, context),
    )


def ltx_stream(stream: Stream) -> Block:
    """Return one modality's part of a block: adaptive norms around attention and MLP, text in between.

    Scales, shifts and gates are computed for every token, so each is as large as the hidden state. A gate keeps the
    three that it was computed with (``block_forward`` of MindSpeed-MM's LTX-2, ``ltx_core`` at 28c3c73).
    """
    rows, width = stream.tokens, stream.width
    state = rows * width
    text = (stream.text_tokens, stream.text_width)
    adaptive = state * (_NORM_COPY + 2 * _SIZE) + 4 * rows
    normed = Block(
        passed_bytes=state * _SIZE * 40,
        kernels=45,
        weights=6 * width,
        # Twice an adaptive norm, its result and a gate with its output; a plain norm before the text; a mask.
        saved_bytes=2 * (adaptive + state * _SIZE * 5) + state * (_NORM_COPY + _SIZE) + 4 * rows + _SIZE,
    )
    own = _ltx_attention((rows, width), (rows, width), stream.heads, width, rotated=True)
    read = _ltx_attention((rows, width), text, stream.heads, width, rotated=False)
    return joined((normed, own, read, mlp_block(rows, width, 4 * width, width)))


def ltx_exchange(video: Stream, audio: Stream) -> Block:
    """Return a block's exchange between both modalities: each attends to the other, with the narrower one's heads."""
    sides = list[Block]()
    for stream in (video, audio):
        state = stream.tokens * stream.width
        sides.append(
            Block(
                passed_bytes=state * _SIZE * 24,
                kernels=24,
                weights=5 * stream.width,
                # A norm and its result, two scales and what they make of it, the output and its gate.
                saved_bytes=state * (_NORM_COPY + 7 * _SIZE) + 4 * stream.tokens + _SIZE,
            )
        )
    seen, heard = (video.tokens, video.width), (audio.tokens, audio.width)
    across = (
        _ltx_attention(seen, heard, audio.heads, audio.width, rotated=True),
        _ltx_attention(heard, seen, audio.heads, audio.width, rotated=True),
    )
    return joined((*sides, *across))


def timestep_block(rows: int, width: int, values: int) -> Block:
    """Return an adaptive norm's table: an embedding of the time step, and ``values`` vectors of it, which all blocks
    read (``AdaLayerNormSingle``)."""
    table = Block(saved_bytes=_SIZE * rows * width * (2 + values))
    return joined((mlp_block(rows, 256, width, width), mlp_block(rows, width, values * width), table))
