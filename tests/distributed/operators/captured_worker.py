"""Captured modules run by their plans on four ranks; prints the worst error and wrong byte counts of every plan."""

import sys

import torch
import torch.distributed as dist
from plan_checks import COUNTER, compare, make_groups, random_plan
from ranks import leave_with
from torch.distributed.device_mesh import init_device_mesh

from mindspeed_autoparallel.operators.strategies import search_graph
from mindspeed_autoparallel.operators.torch.capture import capture_program
from mindspeed_autoparallel.operators.torch.redistribute import groups_of

HEAD = 8


class Fused(torch.nn.Module):
    """One projection for q, k and v, biases, layer norm."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.out, self.up = torch.nn.Linear(width, width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Grouped(torch.nn.Module):
    """Key heads shared by query heads, attention of plain products with a mask, rotary turn, gated MLP."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.other = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.q, self.o = torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.k, self.v = torch.nn.Linear(width, width // 2, bias=False), torch.nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = (
            torch.nn.Linear(width, 2 * width, bias=False),
            torch.nn.Linear(width, 2 * width, bias=False),
        )
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.register_buffer("angles", torch.arange(16, dtype=torch.float64).outer(torch.rand(HEAD // 2).double()))

    def turn(self, x):
        angles = torch.cat((self.angles, self.angles), -1)[: x.shape[2]]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def forward(self, x, mask):
        batch, length, width = x.shape
        y = self.norm(x)
        q, k, v = (p(y).view(batch, length, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.turn(q), self.turn(k)
        k, v = (t.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(batch, -1, length, HEAD) for t in (k, v))
        scores = (q @ k.transpose(-1, -2) / HEAD**0.5).masked_fill(mask, float("-inf"))
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.o(mixed)
        y = self.other(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(torch.nn.Module):
    def __init__(self, block, width=32):
        super().__init__()
        self.table = torch.nn.Embedding(64, width)
        self.layers = torch.nn.ModuleList(block(width) for _ in range(2))
        self.head = torch.nn.Linear(width, 64, bias=False)

    def forward(self, tokens, mask):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def prepared(block):
    """Return a model, its inputs, its capture, and plans by name."""
    torch.manual_seed(0)
    model = Decoder(block).double()
    inputs = (torch.randint(0, 64, (8, 16)), torch.ones(16, 16).triu(1).bool())
    captured = capture_program(model, inputs)
    assert captured.graph.unknown == {}, captured.graph.unknown
    meshes = ((4,), (2, 2))
    plans = [(f"{s} {n}", random_plan(captured.graph, s, n)) for s in meshes for n in range(int(sys.argv[1]))]
    pins = {"layers.0.up": {"rows0": 2, "columns": 2}}
    for mode in ("recursive_programming", "sharding_propagation", "exact"):
        plans.append((mode, search_graph(captured.graph, 4, search_mode=mode, pins=pins)))
    plans.append(("tensor", search_graph(captured.graph, 4, mem_coeff=1e6)))
    return model, inputs, captured, plans


torch.set_num_threads(1)
PREPARED = {block.__name__: prepared(block) for block in (Fused, Grouped)}
"""Once, before the ranks are forked."""


def main():
    dist.init_process_group("gloo")
    COUNTER.install()
    meshes = {(4,): make_groups((4,)), (2, 2): groups_of(init_device_mesh("cpu", (2, 2)))}
    rows = []
    for block, (model, inputs, captured, plans) in PREPARED.items():
        for name, plan in plans:
            row = compare(model, inputs, captured, plan, meshes[plan.decisions.mesh])[:3]
            rows.append((f"{block} {name}", *row))
    leave_with(rows)


if __name__ == "__main__":
    main()
