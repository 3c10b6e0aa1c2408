"""Operator graphs of known model families, built from their published sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import Graph, Node
from mindspeed_autoparallel.operators.rules.products import (
    attention,
    combine,
    dispatch,
    expert_product,
    gather,
    matrix_product,
    norm,
    pointwise,
    router,
    source,
)
from mindspeed_autoparallel.spec.model import DecoderSizes


@dataclass(frozen=True)
class Decoder(DecoderSizes):
    """A decoder-only model; with experts, every MLP consists of them."""

    lora_rank: int = 0
    """Above 0, only adapters of this rank next to q, k, v and o are trained."""

    def as_json(self) -> dict[str, int | bool]:
        """Return the sizes in the form of operator_plan.json."""
        values = dataclasses.asdict(self)
        values |= {"experts_per_token": values.pop("topk"), "head": values.pop("head_size")}
        return values


_BASE: dict[str, Decoder] = {
    "llama2-7b": Decoder(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": Decoder(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": Decoder(80, 8192, 64, 8, 28672, 32000),
    "baichuan2-7b": Decoder(32, 4096, 32, 32, 11008, 125696),
    "baichuan2-13b": Decoder(40, 5120, 40, 40, 13696, 125696),
    "qwen-7b": Decoder(32, 4096, 32, 32, 11008, 151936),
    "qwen-14b": Decoder(40, 5120, 40, 40, 13696, 152064),
    "pangualpha-2.6b": Decoder(32, 2560, 32, 32, 10240, 40000, gated=False),
    "pangualpha-13b": Decoder(40, 5120, 40, 40, 20480, 40000, gated=False),
    "mixtral-8x7b": Decoder(32, 4096, 32, 8, 14336, 32000, num_experts=8, topk=2),
}
_LORA_FAMILIES = ("llama2", "baichuan2", "qwen")
_LORA_RANK = 16
PRESETS: dict[str, Decoder] = {
    **_BASE,
    **{
        f"{name}-lora": replace(shape, lora_rank=_LORA_RANK)
        for name, shape in _BASE.items()
        if name.startswith(_LORA_FAMILIES)
    },
}


def preset_graph(name: str, *, batch: int, sequence: int, num_layers: int | None = None) -> Graph:
    """Return the graph of a preset for a total of ``batch`` samples of ``sequence`` tokens each.

    ``num_layers`` replaces the preset's number. Raises ``ConfigError`` for an unknown name or a size below 1.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown model {name}; the presets are {', '.join(PRESETS)}.")
    if batch < 1 or sequence < 1:
        raise ConfigError(f"batch {batch} and sequence {sequence} must both be 1 or more.")
    return decoder_graph(PRESETS[name], batch=batch, sequence=sequence, num_layers=num_layers)


def decoder_graph(shape: Decoder, *, batch: int, sequence: int, num_layers: int | None = None) -> Graph:
    """Return embedding, layers and output projection of ``shape``; rows are batch times sequence, batch outermost."""
    return _DecoderGraph(shape, batch, sequence).build(shape.num_layers if num_layers is None else num_layers)


class _DecoderGraph:
    def __init__(self, shape: Decoder, batch: int, sequence: int) -> None:
        self.shape, self.batch, self.sequence = shape, batch, sequence
        self.rows, self.head = batch * sequence, shape.head_width
        self.graph = Graph(samples=batch)

    def build(self, num_layers: int) -> Graph:
        rows, hidden, vocabulary = self.rows, self.shape.hidden, self.shape.vocabulary
        self.graph.add(source("tokens", (rows,), item_bytes=8))
        table = self.weight("embedding.table", (vocabulary, hidden))
        stream = self.graph.add(gather("embedding", (table, "tokens"), rows, hidden, vocabulary))
        for layer in range(num_layers):
            stream = self.layer(f"layers.{layer}.", stream)
        stream = self.graph.add(norm("final_norm", (stream, self.weight("final_norm.weight", (hidden,))), rows, hidden))
        output = self.weight("output.weight", (hidden, vocabulary))
        self.graph.add(matrix_product("output", (stream, output), rows, vocabulary, hidden))
        return _with_gradients(self.graph)

    def weight(self, name: str, dims: tuple[int, ...], role: str = "", adapter: bool = False) -> str:
        frozen = self.shape.lora_rank > 0 and not adapter
        return self.graph.add(source(name, dims, parameter=True, frozen=frozen, role=role))

    def put(self, prefix: str, part: str, make: Callable[..., Node], *given: object) -> str:
        """Add what ``make`` returns as ``part`` of a layer, which is also its role; return its name."""
        return self.graph.add(replace(make(prefix + part, *given), role=part))

    def layer(self, prefix: str, stream: str) -> str:
        shape = self.shape
        wide, narrow = shape.query_size, shape.kv_size
        given = self.normed(prefix, "attention_norm", stream)
        q = self.adapted(prefix, "q", given, wide, shape.hidden)
        k = self.adapted(prefix, "k", given, narrow, shape.hidden)
        v = self.adapted(prefix, "v", given, narrow, shape.hidden)
        sizes = (self.batch, self.sequence, shape.heads, shape.kv_heads, self.head)
        mixed = self.put(prefix, "attention", attention, (q, k, v), *sizes)
        stream = self.added(prefix, "attention_add", stream, self.adapted(prefix, "o", mixed, shape.hidden, wide))
        given = self.normed(prefix, "mlp_norm", stream)
        return self.added(prefix, "mlp_add", stream, (self.experts if shape.num_experts else self.mlp)(prefix, given))

    def linear(self, prefix: str, part: str, given: str, columns: int, inner: int, adapter: bool = False) -> str:
        weight = self.weight(f"{prefix}{part}.weight", (inner, columns), f"{part}.weight", adapter)
        return self.put(prefix, part, matrix_product, (given, weight), self.rows, columns, inner)

    def adapted(self, prefix: str, part: str, given: str, columns: int, inner: int) -> str:
        """Add a projection, plus the product of two thin ones if adapters are trained; return the result's name."""
        made = self.linear(prefix, part, given, columns, inner)
        rank = self.shape.lora_rank
        if not rank:
            return made
        thin = self.linear(prefix, f"{part}.lora_a", given, rank, inner, adapter=True)
        other = self.linear(prefix, f"{part}.lora_b", thin, columns, rank, adapter=True)
        return self.put(prefix, f"{part}.lora_add", pointwise, (made, other), (self.rows, columns))

    def normed(self, prefix: str, part: str, given: str) -> str:
        weight = self.weight(f"{prefix}{part}.weight", (self.shape.hidden,), f"{part}.weight")
        return self.put(prefix, part, norm, (given, weight), self.rows, self.shape.hidden)

    def added(self, prefix: str, part: str, first: str, second: str) -> str:
        return self.put(prefix, part, pointwise, (first, second), (self.rows, self.shape.hidden))

    def mlp(self, prefix: str, given: str) -> str:
        shape = self.shape
        up = self.linear(prefix, "up", given, shape.ffn, shape.hidden)
        inputs = (self.linear(prefix, "gate", given, shape.ffn, shape.hidden), up) if shape.gated else (up,)
        active = self.put(prefix, "activation", pointwise, inputs, (self.rows, shape.ffn))
        return self.linear(prefix, "down", active, shape.hidden, shape.ffn)

    def experts(self, prefix: str, given: str) -> str:
        shape, rows = self.shape, self.rows
        number = shape.num_experts
        slots = max(1, rows * shape.topk // number)
        scores = self.weight(f"{prefix}router.weight", (shape.hidden, number), "router.weight")
        sizes = (rows, shape.hidden, number)
        routed = self.put(prefix, "router", router, (given, scores), *sizes)
        sent = self.put(prefix, "dispatch", dispatch, (given, routed), *sizes, slots)

        def product(part: str, source_name: str, columns: int, inner: int) -> str:
            weight = self.weight(f"{prefix}experts.{part}.weight", (number, inner, columns), f"experts.{part}.weight")
            given = (source_name, weight)
            return self.put(prefix, f"experts.{part}", expert_product, given, number, slots, columns, inner)

        up = product("up", sent, shape.ffn, shape.hidden)
        inputs = (product("gate", sent, shape.ffn, shape.hidden), up) if shape.gated else (up,)
        dims = (number, slots, shape.ffn)
        active = self.put(prefix, "experts.activation", pointwise, inputs, dims)
        down = product("down", active, shape.hidden, shape.ffn)
        return self.put(prefix, "combine", combine, (down, routed), *sizes, slots)


def _with_gradients(graph: Graph) -> Graph:
    """Keep a gradient only for operators that depend on a trained parameter."""
    for name, node in graph.nodes.items():
        if node.inputs:
            needs = any(graph.nodes[source_name].needs_gradient for source_name in node.inputs)
            graph.nodes[name] = replace(node, needs_gradient=needs)
    return graph
