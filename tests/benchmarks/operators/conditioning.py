"""How far results of one process move when its inputs move by the last bit: what no plan can be expected to undercut.

Run: python tests/benchmarks/operators/conditioning.py NAME .. (names of families.py). One number per family: the worst
error of the output and of a gradient, measured as families.py measures a plan's.
"""

import copy
import random
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parents[2]
for folder in ("helpers", "distributed/operators"):
    sys.path.insert(0, str(TESTS / folder))

from families import FAMILIES, Flat  # noqa: E402
from plan_checks import relative  # noqa: E402

LAST_BIT = 2.3e-16


def results(model, inputs, change):
    """Return output and gradients with every floating-point input changed by ``change`` of itself, up or down."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    values = [
        value * (1 + change * torch.sign(torch.randn_like(value))) if value.is_floating_point() else value
        for value in inputs.values()
    ]
    torch.manual_seed(2)
    output = model(*values)
    output.square().sum().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        random.seed(0)
        model, inputs = FAMILIES[name]()
        model = Flat(model.double().train(), list(inputs)).train()
        pairs = zip(results(model, inputs, 0.0), results(model, inputs, LAST_BIT), strict=True)
        print(f"| {name} | {max(relative(moved, still) for still, moved in pairs):.1e} |", flush=True)


if __name__ == "__main__":
    main()
