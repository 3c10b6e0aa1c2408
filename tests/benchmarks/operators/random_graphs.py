"""Random modules run by random plans on four ranks, beside one process: bytes and errors; and exact beside its bound.

Run: torchrun --nproc-per-node 4 tests/benchmarks/operators/random_graphs.py [FIRST LAST]. Modules have branches,
residuals, shared weights, transposes, products with vectors, frozen and detached parts; fp64, meshes 4, 2 x 2. Rank 0
searches every graph with the exact mode for 2 to 16 devices, too, and counts bounds above the cost, and gaps.
"""

import random
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "distributed" / "operators"))

from plan_checks import COUNTER, compare, random_plan  # noqa: E402

from mindspeed_autoparallel.operators.search.pricing import Machine  # noqa: E402
from mindspeed_autoparallel.operators.strategies import search_graph  # noqa: E402
from mindspeed_autoparallel.operators.torch.capture import capture_program  # noqa: E402
from mindspeed_autoparallel.operators.torch.redistribute import make_groups  # noqa: E402


class RandomModule(torch.nn.Module):
    """Streams of (8, 8, width) that products, sums, transposes and norms make of each other, drawn by ``seed``."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.weights, self.script = torch.nn.ParameterList(), []
        widths = [8]
        for _ in range(draw.randint(3, 9)):
            given = draw.randrange(len(widths))
            kind = draw.choice(["linear", "linear", "add", "norm", "turn", "vector", "detach", "softmax", "shared"])
            alike = [n for n, width in enumerate(widths) if width == widths[given]]
            if kind == "shared" and any(step[0] == "linear" and step[3] == widths[given] for step in self.script):
                step = draw.choice([s for s in self.script if s[0] == "linear" and s[3] == widths[given]])
                self.script.append(("linear", given, step[2], widths[given]))
                widths.append(self.weights[step[2]].shape[0])
            elif kind in ("linear", "shared"):
                made = draw.choice([4, 8, 16, 6])
                weight = torch.nn.Parameter(torch.randn(made, widths[given]) / 4, requires_grad=draw.random() < 0.8)
                self.weights.append(weight)
                self.script.append(("linear", given, len(self.weights) - 1, widths[given]))
                widths.append(made)
            elif kind == "vector":
                self.weights.append(torch.nn.Parameter(torch.randn(widths[given])))
                self.script.append(("vector", given, len(self.weights) - 1, widths[given]))
                widths.append(widths[given])
            else:
                self.script.append((kind, given, draw.choice(alike), widths[given]))
                widths.append(widths[given])
        self.first = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        streams = [x @ self.first]
        for kind, given, other, width in self.script:
            value = streams[given]
            if kind == "linear":
                made = torch.nn.functional.linear(value, self.weights[other])
            elif kind == "vector":
                made = value * (value @ self.weights[other]).tanh().unsqueeze(-1)
            elif kind == "add":
                made = value + streams[other].tanh()
            elif kind == "norm":
                made = torch.nn.functional.rms_norm(value, (width,))
            elif kind == "turn":
                made = value.transpose(0, 1) + streams[other]
            elif kind == "detach":
                made = value * streams[other].detach().sigmoid()
            else:
                made = value.softmax(1)
            streams.append(made)
        return torch.cat(streams[-3:], -1)


def bounds_of(graph, seed):
    """Search for 2 to 16 devices, one of them per graph: the gap, and whether the bound is above the cost."""
    devices = (2, 4, 6, 8, 12, 16)[seed % 6]
    started = time.process_time()
    machine = Machine(flops_per_us=1e4, memory_bytes_per_us=1e3, link_bytes_per_us=1e2)
    bound = search_graph(graph, devices, search_mode="exact", machine=machine).bound
    taken = time.process_time() - started
    return (
        (devices, None, False, taken) if bound is None else (devices, bound.gap, bound.bound_us > bound.cost_us, taken)
    )


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    COUNTER.install()
    meshes = [make_groups((4,)), make_groups((2, 2))]
    first, last = map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (0, 500)
    worst, wrong, gaps, above, ran, sent = 0.0, [], {}, 0, 0, 0
    for seed in range(first, last):
        torch.manual_seed(seed)
        model, inputs = RandomModule(seed).double(), (torch.randn(8, 8, 8, dtype=torch.float64),)
        captured = capture_program(model, inputs)
        mesh = meshes[seed % 2]
        error, equal, predicted, _ = compare(
            model, inputs, captured, random_plan(captured.graph, mesh.shape, seed), mesh
        )
        worst, ran, sent = max(worst, error), ran + 1, sent + sum(predicted)
        if not equal:
            wrong.append(seed)
        if dist.get_rank() == 0 and seed % 5 == 0:
            devices, gap, is_above, taken = bounds_of(captured.graph, seed // 5)
            gaps.setdefault(devices, []).append((gap, taken))
            above += is_above
        if dist.get_rank() == 0 and (seed + 1) % 50 == 0:
            print(seed + 1, "graphs: worst error", worst, "bytes wrong in", wrong, "sent", sent, flush=True)
    if dist.get_rank() == 0:
        print("ran", ran, "worst fp64 error", worst, "bytes differ in", wrong)
        for devices, found in sorted(gaps.items()):
            told = [gap for gap, _ in found if gap is not None]
            print(f"{devices} devices: {len(found)} graphs, {sum(g < 1e-9 for g in told)} proved optimal, worst gap "
                  f"{max(told, default=float('nan')):.2%}, slowest {max(t for _, t in found):.1f} s; bounds above: {above}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
