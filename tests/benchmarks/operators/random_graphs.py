"""Random modules run by random plans on four ranks, beside one process: bytes and errors; and exact beside its bound.

Run: torchrun --nproc-per-node 4 tests/benchmarks/operators/random_graphs.py [FIRST LAST]. Modules have branches,
residuals, shared weights, transposes, products with vectors, frozen and detached parts; fp64, meshes 4, 2 x 2. Errors
are relative to the norm of each tensor, the worst of all ranks; where one is above 1e-12, one process is itself
compared with the same module in numpy's longdouble. Gaps of the searches: ``exact_gaps.py``.
"""

import random
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "distributed" / "operators"))

from longdouble import gradients  # noqa: E402
from plan_checks import COUNTER, compare, make_groups, random_plan, relative  # noqa: E402

from mindspeed_autoparallel.operators.torch.capture import capture_program  # noqa: E402


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


def own_error(model, x):
    """Give the worst relative error of one fp64 process, output and gradients, against longdouble."""
    out, exact = gradients(model, x)
    model.zero_grad()
    found = model(x)
    found.square().sum().backward()
    errors = [relative(found.detach(), torch.from_numpy(out.astype("float64")))]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            errors.append(relative(parameter.grad, torch.from_numpy(exact[name].astype("float64"))))
    return max(errors)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    COUNTER.install()
    meshes = [make_groups((4,)), make_groups((2, 2))]
    first, last = map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (0, 500)
    worst, wrong, above, sent = 0.0, [], [], 0
    for seed in range(first, last):
        torch.manual_seed(seed)
        model, inputs = RandomModule(seed).double(), (torch.randn(8, 8, 8, dtype=torch.float64),)
        captured = capture_program(model, inputs)
        mesh = meshes[seed % 2]
        plan = random_plan(captured.graph, mesh.shape, seed)
        error, equal, predicted, _ = compare(model, inputs, captured, plan, mesh)
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, (error, equal))
        error, sent = max(e for e, _ in seen), sent + sum(predicted)
        if not all(e for _, e in seen):
            wrong.append(seed)
        if error > 1e-12:
            above.append((seed, error, own_error(model, *inputs)))
        else:
            worst = max(worst, error)
    if dist.get_rank() == 0:
        print(f"graphs {first} to {last}: worst error {worst:.1e} but for {len(above)}; sent {sent}; bytes differ in {wrong}")  # fmt: skip
        for seed, error, own in above:
            print(f"graph {seed}: error {error:.1e}; one process against longdouble {own:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
