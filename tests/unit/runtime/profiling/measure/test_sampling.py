"""Memory is measured on the largest of several microbatches."""

import weakref

import pytest

from mindspeed_autoparallel.runtime.profiling.measure.sampling import largest_of_next, num_bytes, spread_of_next

torch = pytest.importorskip("torch")


def batch(num_rows):
    return {"tokens": torch.zeros(4), "images": [torch.zeros(num_rows, 3)], "name": "a picture"}


def test_the_largest_of_the_next_batches_is_given_alone():
    batches = iter([batch(1), batch(5), batch(2), batch(9)])
    given = list(largest_of_next(batches, 3))
    assert [num_bytes(item) for item in given] == [num_bytes(batch(5))]
    assert num_bytes(next(batches)) == num_bytes(batch(9))


def test_the_returned_batch_is_a_copy_that_no_loader_keeps():
    kept = [batch(2)]
    (given,) = largest_of_next(iter(kept), 16)
    assert given["images"][0].data_ptr() != kept[0]["images"][0].data_ptr()


def test_the_read_batch_is_released_before_the_copy_is_used():
    storages = []

    def batches():
        for num_rows in (1, 5, 2):
            items = [batch(num_rows)]
            storages.append(weakref.ref(items[0]["images"][0].untyped_storage()))
            yield items.pop()

    reading = largest_of_next(batches(), 3)
    given = next(reading)
    storages.append(weakref.ref(given["images"][0].untyped_storage()))
    del given
    assert [storage() for storage in storages] == [None] * 4


class OnlyNext:
    """Like Megatron's RerunDataIterator."""

    def __init__(self, items):
        self._items = iter(items)

    def __next__(self):
        return next(self._items)


def test_an_iterator_with_next_alone_will_do():
    (given,) = largest_of_next(OnlyNext([batch(1), batch(3)]), 16)
    assert num_bytes(given) == num_bytes(batch(3))


@pytest.mark.parametrize("iterator", [None, [iter(()), iter(())]])
def test_ranks_without_an_iterator_of_their_own_keep_what_they_have(iterator):
    assert largest_of_next(iterator) is iterator


def test_a_loader_at_its_end_stays_so():
    exhausted = iter(())
    assert largest_of_next(exhausted) is exhausted


def test_short_middling_and_long_batches_are_chosen_of_the_next():
    batches = iter([batch(rows) for rows in (4, 9, 1, 3, 7, 2)])
    given = spread_of_next(batches, 5)
    assert [len(item["images"][0]) for item in given] == [1, 4, 9]
    assert len(next(batches)["images"][0]) == 2

    class Bare:  # Megatron's RerunDataIterator is no iterable
        def __next__(self):
            return next(batches)

    batches = iter([batch(2), batch(1)])
    assert [len(item["images"][0]) for item in spread_of_next(Bare())] == [1, 1, 2]
    assert spread_of_next(None) == spread_of_next([iter(())]) == spread_of_next(iter(())) == []
