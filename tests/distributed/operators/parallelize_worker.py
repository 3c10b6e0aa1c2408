"""Modules parallelized by the emitted styles on four ranks, against one process: outputs and every gradient."""

import torch
import torch.distributed as dist
from ranks import leave_with
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.strategies import search_graph
from mindspeed_autoparallel.operators.torch.capture import capture_program
from mindspeed_autoparallel.operators.torch.parallelize import parallelize_plan

WIDTH, HEAD = 32, 8


class Block(torch.nn.Module):
    """Attention by heads and a gated MLP; sizes of what may be cut are written as -1."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = torch.nn.RMSNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.q, self.o = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.k, self.v = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (p(y).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.other(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = torch.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, 64, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build():
    torch.manual_seed(0)
    return Decoder().double()


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def check(plan, tokens, expected):
    model = build()
    mesh = init_device_mesh("cpu", (plan.data_size, plan.tensor_size), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan.styles)
    mine = tokens.chunk(plan.data_size)[mesh.get_coordinate()[0]]
    found = model(mine)
    error = (found - expected["out"].chunk(plan.data_size)[mesh.get_coordinate()[0]]).detach().abs().max()
    found.pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        gradient = whole(parameter.grad).clone()
        dist.all_reduce(gradient, group=mesh.get_group("dp"))
        scale = max(1.0, float(expected[name].abs().max()))
        error = max(error, (gradient - expected[name]).abs().max() / scale)
    return float(error)


def prepared():
    """Return tokens, the outputs and gradients of one process, and what plans are lowered to, by name and kind."""
    tokens = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    model = build()
    out = model(tokens)
    out.pow(2).sum().backward()
    expected = {"out": out.detach()} | {n: p.grad for n, p in model.named_parameters()}
    captured = capture_program(build(), (tokens,))
    by_columns = {key: {"rows0": 2, "columns": 2} for key in ("*.q", "*.k", "*.v", "*.gate", "*.up", "head")}
    by_inner = {key: {"rows0": 2, "inner": 2} for key in ("*.o", "*.down")}
    mixed = {**by_columns, **by_inner, "table.embedding": {"rows0": 2, "table": 2}}
    # The look-up has no say in the symbolic costs: it is told to stand with the rest.
    searched = {
        "tensor": search_graph(captured.graph, 4, mem_coeff=1e6, pins={"table.embedding": {"table": 4}}),
        "mixed": search_graph(captured.graph, 4, mem_coeff=0.1, pins=mixed),
        "other": search_graph(captured.graph, 4, search_mode="exact", pins={"*.down": {"columns": 4}}),
    }
    lowered = {}
    for name, plan in searched.items():
        for kind, given in (("plan", plan), ("uniform", derive_megatron(plan).uniform)):
            lowered[name, kind] = parallelize_plan(captured, build(), given)
    return tokens, expected, lowered


torch.set_num_threads(1)
PREPARED = prepared()
"""Once, before the ranks are forked; autograd runs before the capture, behind which it starts threads."""


def main():
    dist.init_process_group("gloo")
    tokens, expected, plans = PREPARED
    rows = []
    for (name, kind), lowered in plans.items():
        error = None if lowered.not_expressed else check(lowered, tokens, expected)
        styles = {module: type(style).__name__ for module, style in lowered.styles.items()}
        sizes = (lowered.data_size, lowered.tensor_size)
        rows.append((name, kind, sizes, error, styles, lowered.not_expressed))
    leave_with(rows)


if __name__ == "__main__":
    main()
