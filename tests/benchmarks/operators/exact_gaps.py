"""Gaps of the exact mode to its bound on random modules, 2 to 64 devices, and of the other modes to it, by family.

Run: python tests/benchmarks/operators/exact_gaps.py [modules|families]. ``modules``: every fifth of 500 random modules.
``families``: what the plan of each mode costs above the bound of the exact mode, on 8 devices; sharding_propagation is
given the exact plan's strategy of the first product as its pin.
"""

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


def modules():
    print("| devices | graphs | proved optimal | within 1 % | median gap % | worst gap % | slowest s | bounds above |")
    for devices in (2, 4, 6, 8, 12, 16, 64):
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


def above_bound(graph, machine):
    """Give percent above the exact mode's bound of the exact, the recursive and the propagated plan."""
    exact = search_graph(graph, 8, search_mode="exact", machine=machine, tied=False)
    first = next(name for name, node in graph.nodes.items() if node.matmul)
    pin = {first: tuple(exact.degrees()[first].items())}
    plans = [
        exact,
        search_graph(graph, 8, machine=machine),
        search_graph(
            graph,
            8,
            search_mode="sharding_propagation",
            machine=machine,
            pins={k: dict(v) for k, v in pin.items()},
            tied=False,
        ),
    ]
    return [100 * (plan_cost(plan, machine).total_us / exact.bound.bound_us - 1) for plan in plans]


def families():
    drawn = {
        "random products": [(random_graph(seed), Machine(flops_per_us=1e6)) for seed in range(40)],
        "random modules": [(module_graph(seed), SMALL) for seed in range(3, 500, 13)],
        "llama2-7b, 2 layers": [
            (preset_graph("llama2-7b", batch=b, sequence=s, num_layers=2), Machine())
            for b in (1, 2, 8, 64) for s in (512, 4096, 16384)
        ],
        "mixtral-8x7b, 1 layer": [
            (preset_graph("mixtral-8x7b", batch=b, sequence=s, num_layers=1), Machine())
            for b in (1, 8, 64) for s in (512, 4096)
        ],
    }  # fmt: skip
    print("| family | graphs | mode | at the bound | median % | 90th % | worst % |")
    for family, graphs in drawn.items():
        rows = list(zip(*(above_bound(*given) for given in graphs), strict=True))
        for mode, values in zip(("exact", "recursive_programming", "sharding_propagation"), rows, strict=True):
            ordered = sorted(values)
            print(
                f"| {family} | {len(ordered)} | {mode} | {sum(v < 1e-6 for v in ordered)} | "
                f"{statistics.median(ordered):.1f} | {ordered[int(0.9 * len(ordered))]:.1f} | {ordered[-1]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    for part in sys.argv[1:] or ("modules", "families"):
        {"modules": modules, "families": families}[part]()
