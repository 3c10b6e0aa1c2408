"""Redistribution sends no more than the shortest sequence that an independent Dijkstra over all placements finds."""

import heapq
import itertools
import math
import random

import pytest

from mindspeed_autoparallel.operators.graph import shortest
from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE
from mindspeed_autoparallel.operators.graph.redistribution import moved_bytes, steps

SHAPE, ITEM = (576, 576), 1728


def _neighbours(state, mesh, shape):
    """Collectives over one mesh dim, reductions and exchanges over any set of them, with the bytes a device sends."""
    piece = math.prod(shape) * ITEM // math.prod(n for n, p in zip(mesh, state, strict=True) if p >= 0)

    def clear(moved, *dims):
        inner = [p for m, p in enumerate(state) if m > min(moved) and m not in moved]
        return not any(d in inner for d in dims)

    for size in range(1, len(mesh) + 1):
        for moved in itertools.combinations(range(len(mesh)), size):
            held = {state[m] for m in moved}
            if len(held) > 1:
                continue
            before, parts = held.pop(), math.prod(mesh[m] for m in moved)
            for after in (REPLICATE, *range(len(shape))):
                if after == before:
                    continue
                if before == REPLICATE:
                    cost = 0
                elif before == PARTIAL:
                    cost = piece * (parts - 1) // parts * (2 if after == REPLICATE else 1)
                elif after == REPLICATE:
                    cost = piece * (parts - 1)
                else:
                    cost = piece * (parts - 1) // parts
                if clear(moved, *(d for d in (before, after) if d >= 0)):
                    yield tuple(after if m in moved else p for m, p in enumerate(state)), cost


def _dijkstra(source, mesh, shape=SHAPE):
    least, queue = {source: 0}, [(0, source)]
    while queue:
        cost, state = heapq.heappop(queue)
        if cost > least[state]:
            continue
        for after, more in _neighbours(state, mesh, shape):
            if cost + more < least.get(after, math.inf):
                least[after] = cost + more
                heapq.heappush(queue, (cost + more, after))
    return least


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (4, 2), (2, 3), (2, 2, 2), (2, 3, 2), (4, 2, 2)])
def test_all_pairs_up_to_three_mesh_dims_equal_dijkstra(mesh):
    worse = []
    for source in itertools.product((PARTIAL, REPLICATE, 0, 1), repeat=len(mesh)):
        least = _dijkstra(source, mesh)
        for target in itertools.product((REPLICATE, 0, 1), repeat=len(mesh)):
            found = moved_bytes(source, target, SHAPE, ITEM, mesh)
            if found != least[target]:
                worse.append((source, target, found, least[target]))
    assert worse == []


@pytest.mark.parametrize(
    ("mesh", "dims", "sources", "targets"),
    [
        ((2,) * 5, 2, 2, 60),
        ((2,) * 6, 2, 1, 40),
        ((2, 4, 2, 2, 2), 2, 1, 40),
        ((2,) * 5, 3, 1, 30),
        pytest.param((2,) * 6, 3, 2, 60, marks=pytest.mark.long),
        pytest.param((2,) * 5, 4, 2, 60, marks=pytest.mark.long),
        pytest.param((2,) * 6, 4, 1, 60, marks=pytest.mark.long),
    ],
)
def test_drawn_pairs_on_five_and_six_mesh_dims_equal_dijkstra(mesh, dims, sources, targets):
    """There is no table: a search with a bound of what remains to be sent."""
    draw, shape = random.Random(30), (576,) * dims
    for _ in range(sources):
        source = tuple(draw.choice((PARTIAL, REPLICATE, *range(dims))) for _ in mesh)
        least = _dijkstra(source, mesh, shape)
        for _ in range(targets):
            target = tuple(draw.choice((REPLICATE, *range(dims))) for _ in mesh)
            assert moved_bytes(source, target, shape, ITEM, mesh) == least[target], (source, target)


def test_on_eight_mesh_dims_placements_of_neither_end_are_passed(monkeypatch):
    mesh, shape = (2,) * 8, (256,) * 3
    source, target = (2, 2, 2, -2, 1, 0, 1, 0), (2, 0, -1, 2, 1, 2, -1, 1)
    found = moved_bytes(source, target, shape, ITEM, mesh)
    for cache in (moved_bytes, shortest.shortest_moves, shortest._search):
        cache.cache_clear()
    monkeypatch.setattr(shortest, "_LARGEST_TRIED", 0)
    cut = moved_bytes(source, target, shape, ITEM, mesh)
    for cache in (moved_bytes, shortest.shortest_moves, shortest._search):
        cache.cache_clear()
    assert 1.9 * found < cut


def test_no_step_passes_a_placement_that_does_not_divide():
    # Five rows cannot be cut in two: the exchange that would be cheapest is not possible.
    assert [s.collective for s in steps((1, REPLICATE), (REPLICATE, REPLICATE), (5, 8), (2, 2))] == ["all_gather"]
    for source in itertools.product((PARTIAL, REPLICATE, 1), repeat=3):
        for target in itertools.product((REPLICATE, 1), repeat=3):
            assert all(0 not in (s.before, s.after) for s in steps(source, target, (5, 8), (2, 2, 2)))


def test_a_swap_of_two_cuts_goes_by_exchanges():
    # Lifting both cuts and making them again would send the whole tensor but one piece.
    whole = math.prod(SHAPE) * ITEM
    assert moved_bytes((0, 0), (1, 1), SHAPE, ITEM, (2, 2)) == whole // 4 * 3 // 4
