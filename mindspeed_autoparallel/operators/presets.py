"""Models by shape: the published sizes of the families that the seed table lists, as operator graphs."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.rules.products import attention, gather, matrix_product, norm, pointwise, source


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model; ``gated``: the MLP has a gate projection beside the up projection."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool = True


PRESETS: dict[str, ModelShape] = {
    "llama2-7b": ModelShape(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": ModelShape(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": ModelShape(80, 8192, 64, 8, 28672, 32000),
    "baichuan2-7b": ModelShape(32, 4096, 32, 32, 11008, 125696),
    "baichuan2-13b": ModelShape(40, 5120, 40, 40, 13696, 125696),
    "qwen-7b": ModelShape(32, 4096, 32, 32, 11008, 151936),
    "qwen-14b": ModelShape(40, 5120, 40, 40, 13696, 152064),
    "pangualpha-2.6b": ModelShape(32, 2560, 32, 32, 10240, 40000, gated=False),
    "pangualpha-13b": ModelShape(40, 5120, 40, 40, 20480, 40000, gated=False),
}


def preset_graph(name: str, *, batch: int, sequence: int, num_layers: int | None = None) -> Graph:
    """The graph of a preset for ``batch`` samples of ``sequence`` tokens in total; ``num_layers`` shortens it."""
    if name not in PRESETS:
        raise ConfigError(f"unknown model {name}; the presets are {', '.join(PRESETS)}.")
    if batch < 1 or sequence < 1:
        raise ConfigError(f"batch {batch} and sequence {sequence} must both be 1 or more.")
    return decoder_graph(PRESETS[name], batch=batch, sequence=sequence, num_layers=num_layers)


def decoder_graph(shape: ModelShape, *, batch: int, sequence: int, num_layers: int | None = None) -> Graph:
    """Embedding, layers and output projection of ``shape``; rows are batch times sequence, batch outermost."""
    graph = Graph(samples=batch)
    rows, hidden, head = batch * sequence, shape.hidden, shape.hidden // shape.heads
    graph.add(source("tokens", (rows,), item_bytes=8))
    graph.add(source("embedding.table", (shape.vocabulary, hidden), parameter=True))
    stream = graph.add(gather("embedding", ("embedding.table", "tokens"), rows, hidden))
    for layer in range(shape.num_layers if num_layers is None else num_layers):
        stream = _layer(graph, shape, f"layers.{layer}", stream, batch, sequence, head)
    graph.add(source("final_norm.weight", (hidden,), parameter=True))
    stream = graph.add(norm("final_norm", (stream, "final_norm.weight"), rows, hidden))
    graph.add(source("output.weight", (hidden, shape.vocabulary), parameter=True))
    graph.add(matrix_product("output", (stream, "output.weight"), rows, shape.vocabulary, hidden))
    return graph


def _layer(graph: Graph, shape: ModelShape, prefix: str, stream: str, batch: int, sequence: int, head: int) -> str:
    rows, hidden = batch * sequence, shape.hidden

    def linear(part: str, given: str, columns: int, inner: int) -> str:
        weight = graph.add(source(f"{prefix}.{part}.weight", (inner, columns), parameter=True, role=f"{part}.weight"))
        return graph.add(matrix_product(f"{prefix}.{part}", (given, weight), rows, columns, inner, role=part))

    def normed(part: str, given: str) -> str:
        weight = graph.add(source(f"{prefix}.{part}.weight", (hidden,), parameter=True, role=f"{part}.weight"))
        return graph.add(norm(f"{prefix}.{part}", (given, weight), rows, hidden, role=part))

    def added(part: str, first: str, second: str) -> str:
        return graph.add(pointwise(f"{prefix}.{part}", (first, second), (rows, hidden), role=part))

    given = normed("attention_norm", stream)
    q = linear("q", given, shape.heads * head, hidden)
    k = linear("k", given, shape.kv_heads * head, hidden)
    v = linear("v", given, shape.kv_heads * head, hidden)
    mixed = graph.add(
        attention(
            f"{prefix}.attention",
            (q, k, v),
            batch=batch,
            sequence=sequence,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head=head,
            role="attention",
        )
    )
    stream = added("attention_add", stream, linear("o", mixed, hidden, shape.heads * head))
    given = normed("mlp_norm", stream)
    up = linear("up", given, shape.ffn, hidden)
    inputs = (linear("gate", given, shape.ffn, hidden), up) if shape.gated else (up,)
    active = graph.add(pointwise(f"{prefix}.activation", inputs, (rows, shape.ffn), role="activation"))
    return added("mlp_add", stream, linear("down", active, hidden, shape.ffn))
