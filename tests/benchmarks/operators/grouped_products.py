"""Grouped products (``grouped_mm``) in bf16, run by random plans on four ranks, beside one process.

Run: torchrun --nproc-per-node 4 tests/benchmarks/operators/grouped_products.py. The difference of the plans from one
process, beside what bf16 itself costs that process against fp32, and whether bytes are those predicted. Experts are not
cut; columns and inner are. torch captures these products in bf16 and fp16 only.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "distributed" / "operators"))

from plan_checks import COUNTER, compare, make_groups, random_plan, relative

from mindspeed_autoparallel.operators.torch.capture import capture_program

PLANS = 8


class Grouped(torch.nn.Module):
    """Rows in order of their expert: up, activation, down, each a grouped product; one expert has no rows."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(4, 32, 64) / 6)
        self.down = torch.nn.Parameter(torch.randn(4, 64, 32) / 8)
        self.register_buffer("ends", torch.tensor([8, 24, 24, 64], dtype=torch.int32))

    def forward(self, rows):
        hidden = torch.nn.functional.silu(torch.nn.functional.grouped_mm(rows, self.up, offs=self.ends))
        return torch.nn.functional.grouped_mm(hidden, self.down, offs=self.ends)


def trained(model, rows):
    """Give the output and the gradients of one process, in fp32."""
    model.zero_grad()
    out = model(rows)
    out.square().sum().backward()
    return [out.detach().float(), *(p.grad.float() for p in model.parameters())]


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    COUNTER.install()
    meshes = [make_groups((4,)), make_groups((2, 2))]
    torch.manual_seed(0)
    model, rows = Grouped(), torch.randn(64, 32)
    exact = trained(model, rows)
    made, given = copy.deepcopy(model).bfloat16(), rows.bfloat16()
    alone = max(relative(a, b) for a, b in zip(trained(made, given), exact, strict=True))
    captured = capture_program(made, (given,))
    found = []
    for seed in range(PLANS):
        mesh = meshes[seed % 2]
        found.append(compare(made, (given,), captured, random_plan(captured.graph, mesh.shape, seed), mesh)[:2])
    unknown = sorted(set(captured.graph.unknown.values()))
    if dist.get_rank() == 0:
        worst, equal = max(row[0] for row in found), all(row[1] for row in found)
        print(f"{PLANS} plans differ from one process by at most {worst:.1e}, bytes equal: {equal}", flush=True)
        print(f"one process in bf16 differs from fp32 by {alone:.1e}; without a rule: {unknown}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
