"""Executes plans on gloo ranks and compares with one process; prints the worst error and any wrong byte count."""

import dataclasses
import sys

import torch
import torch.distributed as dist
from plan_checks import COUNTER, make_groups, random_plan
from ranks import leave_with
from torch.nn import functional

from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.presets import Decoder, decoder_graph
from mindspeed_autoparallel.operators.strategies import search_graph
from mindspeed_autoparallel.operators.torch.calls import look_up
from mindspeed_autoparallel.operators.torch.planned import execute
from mindspeed_autoparallel.operators.torch.redistribute import redistribute

BATCH, SEQUENCE, HEAD = 8, 4, 4


def attend(q, k, v):
    q, k, v = (t.reshape(-1, SEQUENCE, t.shape[1] // HEAD, HEAD).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    mixed = torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1) @ v
    return mixed.transpose(1, 2).reshape(-1, q.shape[1] * HEAD)


FUNCTIONS = {
    "gather": lambda table, index: functional.embedding(index, table),
    "matmul": torch.matmul,
    "norm": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "attention": attend,
    "activation": lambda gate, up: functional.silu(gate) * up,
    "pointwise": torch.add,
}


def tiny_graph():
    shape = Decoder(1, 32, 8, 4, 64, 48)
    nodes = decoder_graph(shape, batch=BATCH, sequence=SEQUENCE).nodes
    return Graph({name: dataclasses.replace(node, item_bytes=8) for name, node in nodes.items()})


def check(plan, mesh, values, expected):
    mesh.sent_bytes = COUNTER.sent = 0
    graph = plan.decisions.graph
    pieces = {n: mesh.piece(v.detach(), plan.decisions.output_placements(n)) for n, v in values.items()}
    for name, piece in pieces.items():
        piece.requires_grad_(graph.nodes[name].is_parameter)
    functions = {**FUNCTIONS, "embedding": look_up("embedding", plan.decisions, mesh)}
    made = execute(plan.decisions, pieces, functions, mesh)
    forward, counted_forward = mesh.sent_bytes, COUNTER.sent
    placements, everywhere = plan.decisions.output_placements("output"), (-1,) * len(mesh.shape)
    shape = graph.nodes["output"].output_shape
    logits = redistribute(made["output"], placements, (everywhere, everywhere), shape, mesh)
    error = (logits - expected["output"]).abs().max()
    mesh.sent_bytes = COUNTER.sent = 0
    logits.pow(2).sum().backward()
    backward, counted_backward = mesh.sent_bytes, COUNTER.sent
    for name, piece in pieces.items():
        if graph.nodes[name].is_parameter:
            gradient = mesh.piece(expected[name], plan.decisions.output_placements(name))
            scale = max(1.0, float(expected[name].abs().max()))
            error = max(error, (piece.grad - gradient).abs().max() / scale)
    predicted = [sum(column) for column in zip(*plan.edge_bytes().values(), strict=True)]
    return float(error), predicted == [forward, backward] == [counted_forward, counted_backward], predicted


def main():
    dist.init_process_group("gloo")
    COUNTER.install()
    torch.set_num_threads(1)
    graph = tiny_graph()
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, node in graph.nodes.items():
        if node.is_parameter:
            values[name] = torch.randn(node.output_shape, generator=generator, dtype=torch.float64) * 0.2
        elif not node.inputs:
            values[name] = torch.randint(0, 48, node.output_shape, generator=generator)
    made = {}
    for name, node in graph.nodes.items():
        if not node.inputs:
            made[name] = values[name].requires_grad_(node.is_parameter)
        else:
            function = FUNCTIONS.get(node.role) or FUNCTIONS[node.kind]
            made[name] = function(*(made[source] for source in node.inputs))
    made["output"].pow(2).sum().backward()
    expected = {n: v.grad for n, v in values.items() if v.requires_grad} | {"output": made["output"].detach()}
    meshes = {(4,): make_groups((4,)), (2, 2): make_groups((2, 2))}
    plans = [
        (f"random {shape} {seed}", random_plan(graph, shape, seed))
        for shape in meshes
        for seed in range(int(sys.argv[1]))
    ]
    pins = {"layers.0.q": {"rows": 2, "columns": 2}}
    for mode in ("recursive_programming", "sharding_propagation", "exact"):
        plans.append((mode, search_graph(graph, 4, search_mode=mode, pins=pins)))
    rows = [(name, *check(plan, meshes[plan.decisions.mesh], values, expected)) for name, plan in plans]
    leave_with(rows)


if __name__ == "__main__":
    main()
