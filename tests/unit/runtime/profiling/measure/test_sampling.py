"""Memory is measured on the largest of several microbatches."""

import pytest

from mindspeed_autoparallel.runtime.profiling.measure.sampling import largest_of_next, num_bytes

torch = pytest.importorskip("torch")


def batch(num_rows):
    return {"tokens": torch.zeros(4), "images": [torch.zeros(num_rows, 3)], "name": "a picture"}


def test_the_largest_of_the_next_batches_is_given_alone():
    batches = iter([batch(1), batch(5), batch(2), batch(9)])
    given = list(largest_of_next(batches, 3))
    assert [num_bytes(item) for item in given] == [num_bytes(batch(5))]
    assert num_bytes(next(batches)) == num_bytes(batch(9))


def test_what_is_given_is_a_copy_that_no_loader_keeps():
    kept = [batch(2)]
    (given,) = largest_of_next(iter(kept), 16)
    assert given["images"][0].data_ptr() != kept[0]["images"][0].data_ptr()


@pytest.mark.parametrize("iterator", [None, [iter(()), iter(())]])
def test_ranks_without_an_iterator_of_their_own_keep_what_they_have(iterator):
    assert largest_of_next(iterator) is iterator
