"""How far each mode is above the optimum of one cut, by the shared cost model, on random graphs."""

import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from greedy_cuts import solve_greedy

from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, pointwise, source
from mindspeed_autoparallel.operators.search.exact import solve_exact
from mindspeed_autoparallel.operators.search.fill import fill_rest
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.problem import build_problem
from mindspeed_autoparallel.operators.search.propagation import solve_propagation
from mindspeed_autoparallel.operators.search.recursive import cut_all_products
from mindspeed_autoparallel.operators.search.state import Decisions


def random_graph(seed: int) -> Graph:
    """Three to eight products and sums over random shapes with reused streams."""
    draw = random.Random(seed)
    graph, rows, width = Graph(), draw.choice([64, 512, 4096]), draw.choice([32, 256, 2048])
    streams = [(graph.add(source("x", (rows, width))), width)]
    for number in range(draw.randint(3, 8)):
        given, inner = draw.choice(streams)
        columns = draw.choice([32, 256, 2048])
        weight = graph.add(source(f"w{number}", (inner, columns), parameter=True))
        made = graph.add(matrix_product(f"m{number}", (given, weight), rows, columns, inner))
        partners = [name for name, wide in streams if wide == columns and name != "x"]
        streams.append((made, columns))
        if partners and draw.random() < 0.7:
            both = (made, draw.choice(partners))
            streams.append((graph.add(pointwise(f"a{number}", both, (rows, columns))), columns))
    return graph


def main() -> None:
    gaps: dict[str, list[float]] = {"recursive_programming": [], "sharding_propagation": [], "greedy": []}
    for seed in range(240):
        graph = random_graph(seed)
        empty = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
        problem = build_problem(empty, 2, Machine(flops_per_us=1e6), {}, tied=False)
        best_picks = solve_exact(problem)
        best = problem.total_us(best_picks)
        first = next(v for v, names in enumerate(problem.members) if names[0] == "m0")
        # Propagation gets the optimum's strategy for the first product as its pin.
        chosen = problem.spread(best_picks)["m0"]
        pinned = build_problem(empty, 2, Machine(flops_per_us=1e6), {"m0": chosen}, tied=False)
        products, _, decided = cut_all_products(graph, [{}], 0.1)
        recursive = {name: made[0] for name, made in fill_rest(products, decided).choices.items()}
        found = {
            "recursive_programming": problem.total_us(problem.picks(recursive)),
            "sharding_propagation": pinned.total_us(solve_propagation(pinned, {first})),
            "greedy": problem.total_us(solve_greedy(problem)),
        }
        for mode, cost in found.items():
            gaps[mode].append(100 * (cost / best - 1))
    print("| mode | graphs | optimal | median % | mean % | 90th % | worst % |")
    for mode, values in gaps.items():
        values.sort()
        optimal = sum(v < 1e-6 for v in values)
        print(
            f"| {mode} | {len(values)} | {optimal} | {statistics.median(values):.1f} | {statistics.mean(values):.1f} | "
            f"{values[int(0.9 * len(values))]:.1f} | {values[-1]:.1f} |"
        )


if __name__ == "__main__":
    main()
