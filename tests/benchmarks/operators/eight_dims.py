"""Redistributions on eight mesh dims (256 devices), three tensor dims: the search with a limit beside the one without,
and beside the one that passes only placements of the two ends.

python tests/benchmarks/operators/eight_dims.py [NUMBER] [SEED]
"""

from __future__ import annotations

import math
import random
import sys
import time

from mindspeed_autoparallel.operators.graph import shortest
from mindspeed_autoparallel.operators.graph.transitions import Move, State, bytes_sent

MESH, CAPS = (2,) * 8, (256,) * 3
LIMITS = {"cut": (0, 0), "as used": (shortest._LARGEST_TRIED, shortest._MOST_TAKEN), "without a limit": (10**9, 10**9)}


def draw(chance: random.Random) -> tuple[State, State]:
    """Return two placements whose mesh dims cannot be joined."""
    while True:
        source = tuple(chance.choice((-2, -1, 0, 1, 2, 0, 1, 2)) for _ in MESH)
        target = tuple(chance.choice((-1, 0, 1, 2)) for _ in MESH)
        if len(shortest._joined(source, target)) == len(MESH):
            return source, target


def share(source: State, moves: list[Move]) -> float:
    """Return the share of the tensor that a device sends."""
    state, total = list(source), 0.0
    for dims, before, after in moves:
        local = 1 / math.prod(n for n, p in zip(MESH, state, strict=True) if p >= 0)
        total += bytes_sent(before, after, math.prod(MESH[d] for d in dims), local)
        for d in dims:
            state[d] = after
    return total


def main(number: int, seed: int) -> None:
    chance = random.Random(seed)
    pairs = [draw(chance) for _ in range(number)]
    found: dict[str, list[float]] = {}
    for name, (shortest._LARGEST_TRIED, shortest._MOST_TAKEN) in LIMITS.items():
        shortest._search.cache_clear()
        started = time.process_time()
        found[name] = [share(source, shortest._search(source, target, MESH, CAPS)) for source, target in pairs]
        print(f"{name}: {(time.process_time() - started) / number:.3f} processor seconds a pair")
    for name in ("cut", "as used"):
        above = sorted(
            own / least - 1 for own, least in zip(found[name], found["without a limit"], strict=True) if least
        )
        print(f"{name}, above the least: mean {sum(above) / len(above):.1%}, largest {above[-1]:.1%} of {len(above)}")


if __name__ == "__main__":
    main(*(int(value) for value in (*sys.argv[1:], *("20", "1")[len(sys.argv) - 1 :])))
