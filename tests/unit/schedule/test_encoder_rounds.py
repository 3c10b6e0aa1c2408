"""Encoder batches whose rows travel while the next is computed: closed forms, long runs, mixed runs."""

from __future__ import annotations

import pytest

from mindspeed_autoparallel.schedule.encoder_pipeline import Rounds, backward_us, forward_us


def runs(*parts: tuple[int, float, float]) -> list[Rounds]:
    return [Rounds(count=count, compute_us=compute, transfer_us=transfer) for count, compute, transfer in parts]


@pytest.mark.parametrize("time", [forward_us, backward_us])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_the_shorter_of_computation_and_transfer_is_hidden_but_once(time, count: int) -> None:  # type: ignore[no-untyped-def]
    assert time(runs((count, 10.0, 3.0))) == pytest.approx(count * 10.0 + 3.0)
    assert time(runs((count, 3.0, 10.0))) == pytest.approx(count * 10.0 + 3.0)


@pytest.mark.parametrize("time", [forward_us, backward_us])
def test_a_long_run_is_the_sum_of_its_halves(time) -> None:  # type: ignore[no-untyped-def]
    for compute, transfer in ((10.0, 3.0), (3.0, 10.0), (5.0, 5.0), (5.0, 0.0)):
        one = time(runs((13, compute, transfer), (1, 4.0, 2.0)))
        two = time(runs(*[(1, compute, transfer)] * 13, (1, 4.0, 2.0)))
        assert one == pytest.approx(two)


def test_a_last_shorter_batch_does_not_wait_longer_than_it_must() -> None:
    assert forward_us(runs((2, 10.0, 3.0), (1, 4.0, 1.0))) == pytest.approx(25.0)
    assert backward_us(runs((2, 10.0, 3.0), (1, 4.0, 1.0))) == pytest.approx(27.0)


def test_an_empty_batch_takes_no_time() -> None:
    assert forward_us([]) == backward_us([]) == 0.0


def test_inputs_wait_for_the_rows_of_the_batch_before() -> None:
    runs = [Rounds(count=2, compute_us=10.0, transfer_us=7.0, inputs_us=3.0)]
    assert forward_us(runs) == 2 * (3.0 + 10.0 + 7.0)
    assert forward_us([Rounds(count=9, compute_us=10.0, transfer_us=7.0, inputs_us=3.0)]) == 9 * 20.0
    assert forward_us([Rounds(count=2, compute_us=10.0, transfer_us=7.0)]) == 10.0 + 10.0 + 7.0
