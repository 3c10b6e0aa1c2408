"""The step's raw batches: read ahead for encoders, and let go of once the schedule has taken them."""

from __future__ import annotations

import gc
import weakref

import pytest

pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.hetero.batches import packed_while_waiting, pull

pytestmark = pytest.mark.torch


class Batch:
    """Something a weak reference can name."""


def test_a_batch_goes_when_the_schedule_lets_it_go() -> None:
    made = [Batch() for _ in range(3)]
    alive = [weakref.ref(batch) for batch in made]
    batches, taken = pull(iter(made), 3)
    del made
    assert batches is not None
    assert all(isinstance(batch, Batch) for batch in batches)
    for microbatch in range(3):
        batch = next(taken)
        assert alive[microbatch]() is batch
        del batch
        gc.collect()
        assert [reference() is not None for reference in alive] == [later > microbatch for later in range(3)]


def test_every_chunk_of_a_rank_has_its_own_batches() -> None:
    batches, taken = pull([iter("abc"), None, iter("abc")], 2)
    assert batches is not None
    assert list(batches) == ["a", "b"]
    first, none, third = taken
    assert none is None
    assert [next(first), next(first), next(third)] == ["a", "b", "a"]
    assert list(batches) == [None, None]


def test_a_reader_that_releases_later_has_a_copy() -> None:
    batches, taken = pull(iter("ab"), 2)
    assert batches is not None
    other = batches.copy()
    assert next(taken) == "a"
    assert [other.take(0), other.take(0), batches[0]] == ["a", None, None]


def test_packed_batches_are_made_anew_for_every_reader() -> None:
    made = [{"rows": [1, 2]}, {"rows": [3]}]
    with packed_while_waiting():
        batches, taken = pull(iter(made), 2)
    assert batches is not None
    assert batches[0] == made[0]
    assert batches[0] is not made[0]
    assert list(taken) == made
    assert pull(iter(made), 1)[1].__next__() is made[0], "outside they wait as they are"
