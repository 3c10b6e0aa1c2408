"""Packs of samples: first every replica's samples, by work, then the packs of each replica within a limit of tokens."""

from __future__ import annotations

import heapq

import numpy

from mindspeed_autoparallel.data.partition import partition
from mindspeed_autoparallel.data.work import Array

ABSENT = -1
"""Fills up packs with fewer samples than the largest one."""


def equal_packs(work: Array, tokens: Array, num_replicas: int, size: int, max_tokens: int) -> Array | None:
    """Return samples ``[replica, pack, place]``, ``size`` in every pack; nothing where a pack has too many tokens.

    ``work [sample, phase]``, ``tokens [sample]``; ``max_tokens`` 0: any number.
    """
    bins = partition(work, num_replicas, len(work) // num_replicas)
    members = numpy.argsort(bins, kind="stable").reshape(num_replicas, -1)
    for key in (work.sum(axis=1), tokens):
        order = numpy.argsort(-key[members], axis=1, kind="stable")
        rows = numpy.take_along_axis(members, order, axis=1).reshape(num_replicas, size, -1)
        # The heaviest of one row meets the lightest of the next.
        rows[:, 1::2] = rows[:, 1::2, ::-1]
        packs: Array = rows.swapaxes(1, 2)
        if not max_tokens or tokens[packs].sum(axis=2).max() <= max_tokens:
            return packs
    return None


def filled_packs(work: Array, tokens: Array, num_replicas: int, num_packs: int, max_tokens: int) -> Array | None:
    """Return samples ``[replica, pack, place]`` with any number in a pack but none empty, ``ABSENT`` where there is no
    more; nothing where no way was found that keeps every pack within ``max_tokens`` (0: any number).

    ``work [sample, phase]``, ``tokens [sample]``; ``num_packs`` of a replica.
    """
    for key in (work, tokens[:, None].astype(numpy.float64)):
        members = _replicas(key, num_replicas, num_packs)
        packs = [_fill(one, key.sum(axis=1), tokens, num_packs, max_tokens) for one in members]
        if all(packs):
            return _padded([pack for replica in packs for pack in replica], num_replicas)
    # Into any pack with room, even or not.
    together = _fill(list(range(len(work))), tokens, tokens, num_replicas * num_packs, max_tokens)
    return _padded(together, num_replicas) if together else None


def _replicas(work: Array, num_replicas: int, num_packs: int) -> list[list[int]]:
    """Return the samples of every replica, any number but one for each pack."""
    number = len(work)
    places = number // num_replicas + max(1, number // num_replicas // 4)
    # Empty places count as samples without work.
    empty = numpy.zeros((places * num_replicas - number, work.shape[1]))
    bins = partition(numpy.concatenate((work, empty)), num_replicas, places)[:number]
    members = [numpy.flatnonzero(bins == replica).tolist() for replica in range(num_replicas)]
    total = work.sum(axis=1)
    for few in members:
        while len(few) < num_packs:
            _, lightest, giver = min(
                (total[sample], sample, place)
                for place, other in enumerate(members)
                if len(other) > num_packs
                for sample in other
            )
            members[giver].remove(lightest)
            few.append(lightest)
    return members


def _fill(samples: list[int], key: Array, tokens: Array, num_packs: int, max_tokens: int) -> list[list[int]]:
    """Return packs of ``samples``, by falling ``key`` to the lightest pack with room; none where there is no room."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    open_packs = [(0.0, 0, index) for index in range(num_packs)]
    for sample in sorted(samples, key=lambda one: (-key[one], one)):
        size = int(tokens[sample])
        full = []
        while open_packs:
            load, used, index = heapq.heappop(open_packs)
            if not max_tokens or used + size <= max_tokens:
                packs[index].append(sample)
                full.append((load + float(key[sample]), used + size, index))
                break
            full.append((load, used, index))
        else:
            return []
        for one in full:
            heapq.heappush(open_packs, one)
    return packs if all(packs) else []


def _padded(packs: list[list[int]], num_replicas: int) -> Array:
    longest = max(map(len, packs))
    rows: Array = numpy.array([pack + [ABSENT] * (longest - len(pack)) for pack in packs])
    return rows.reshape(num_replicas, -1, longest)
