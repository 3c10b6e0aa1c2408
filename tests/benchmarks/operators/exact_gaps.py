"""Gaps of the exact mode to its bound on random modules, 2 to 64 devices, and of the other modes to it, by family.

Run: python tests/benchmarks/operators/exact_gaps.py [modules|families|FAMILY ..] [DEVICES ..]. ``modules``: 16 or 17 of
500 random modules per number of devices. ``families``, or some of ``FAMILIES``: what the plan of each mode costs above
the bound of the exact mode, on 8 devices where no number is given; sharding_propagation is given the exact plan's
strategy of the first product as its pin. Graphs without a bound are counted, not scored.
"""

import itertools
import statistics
import sys
import time
import warnings

import torch
from gaps import random_graph
from random_graphs import RandomModule

from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.torch.capture import capture_program

warnings.filterwarnings("ignore")
SMALL = Machine(flops_per_us=1e4, memory_bytes_per_us=1e3, link_bytes_per_us=1e2)


def module_graph(seed):
    torch.manual_seed(seed)
    return capture_program(RandomModule(seed).double(), (torch.randn(8, 8, 8, dtype=torch.float64),)).graph


def modules(numbers):
    print("| devices | graphs | proved optimal | within 1 % | median gap % | worst gap % | slowest s | bounds above |")
    for devices in numbers or (2, 4, 6, 8, 12, 16, 64):
        gaps, above, slowest = [], 0, 0.0
        for seed in range(5 * (devices % 7), 500, 30):
            started = time.process_time()
            bound = search_graph(module_graph(seed), devices, search_mode="exact", machine=SMALL).bound
            slowest = max(slowest, time.process_time() - started)
            if bound is not None:
                gaps.append(100 * bound.gap)
                above += bound.bound_us > bound.cost_us * (1 + 1e-12)
        print(
            f"| {devices} | {len(gaps)} | {sum(g < 1e-7 for g in gaps)} | {sum(g <= 1 for g in gaps)} | "
            f"{statistics.median(gaps):.1f} | {max(gaps):.1f} | {slowest:.1f} | {above} |",
            flush=True,
        )


def above_bound(graph, machine, devices):
    """Give percent above the exact mode's bound of every plan of ``MODES``; None without a bound."""
    exact = search_graph(graph, devices, search_mode="exact", machine=machine, tied=False)
    if exact.bound is None:
        return None
    first = next(name for name, node in graph.nodes.items() if node.matmul)
    pins = {first: dict(exact.degrees()[first])}
    propagation = {"search_mode": "sharding_propagation", "pins": pins, "tied": False}
    others = ({}, {"mem_coeff": 0.1}, propagation)
    plans = [exact, *(search_graph(graph, devices, machine=machine, **given) for given in others)]
    return [100 * (plan_cost(plan, machine).total_us / exact.bound.bound_us - 1) for plan in plans]


def presets(name, layers, batches, sequences):
    sizes = itertools.product(batches, sequences)
    return [(preset_graph(name, batch=b, sequence=s, num_layers=layers), Machine()) for b, s in sizes]


MODES = ("exact", "recursive_programming", "recursive_programming, mem_coeff 0.1", "sharding_propagation")
FAMILIES = {
    "random-products": lambda: [(random_graph(seed), Machine(flops_per_us=1e6)) for seed in range(40)],
    "random-modules": lambda: [(module_graph(seed), SMALL) for seed in range(3, 500, 13)],
    "llama": lambda: presets("llama2-7b", 2, (1, 2, 8, 64), (512, 4096, 16384)),
    "llama-lora": lambda: presets("llama2-7b-lora", 1, (1, 8, 64), (512, 4096)),
    "mixtral": lambda: presets("mixtral-8x7b", 1, (1, 8, 64), (512, 4096)),
}


def families(names, numbers):
    print("| family | devices | graphs | without a bound | mode | at the bound | median % | 90th % | worst % |")
    for family, devices in itertools.product(names, numbers or [8]):
        found = [above_bound(graph, machine, devices) for graph, machine in FAMILIES[family]()]
        rows = list(zip(*(row for row in found if row), strict=True))
        for mode, values in zip(MODES, rows, strict=True):
            ordered = sorted(values)
            print(
                f"| {family} | {devices} | {len(found)} | {found.count(None)} | {mode} | {sum(v < 1e-6 for v in ordered)} | "
                f"{statistics.median(ordered):.1f} | {ordered[int(0.9 * len(ordered))]:.1f} | {ordered[-1]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    asked = sys.argv[1:] or ["modules", "families"]
    given = [int(number) for number in asked if number.isdigit()]
    if "modules" in asked:
        modules(given)
    picked = list(FAMILIES) if "families" in asked else [name for name in asked if name in FAMILIES]
    if picked:
        families(picked, given)
