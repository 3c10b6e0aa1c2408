"""``--data-balance`` and ``--order-microbatches`` of any host: works, shares, and the iterators of a step."""

from __future__ import annotations

import argparse
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.data.balance import share  # noqa: E402
from mindspeed_autoparallel.errors import ConfigError  # noqa: E402
from mindspeed_autoparallel.runtime import state  # noqa: E402
from mindspeed_autoparallel.runtime.features.data_balance.entry import prepare  # noqa: E402
from mindspeed_autoparallel.runtime.features.data_balance.stepping import MicrobatchOrder, describe, schedule  # noqa: E402
from mindspeed_autoparallel.runtime.features.data_balance.weights import batch_work  # noqa: E402
from mindspeed_autoparallel.runtime.megatron.description import describe as describe_model  # noqa: E402

pytestmark = pytest.mark.torch
SCRIPT: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 32,
    "num_attention_heads": 1,
    "pipeline_model_parallel_layout": None,
}


def texts(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": torch.zeros(1, length, dtype=torch.long)} for length in lengths]


def prepared(**flags: Any) -> MicrobatchOrder:
    prepare(argparse.Namespace(**{**SCRIPT, **flags}))
    return state.of_process(MicrobatchOrder)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_INSTANCES", {})


def test_work_of_text_is_its_rows_and_their_squares() -> None:
    work = batch_work(describe_model(argparse.Namespace(**SCRIPT)), argparse.Namespace(**SCRIPT))
    # 3 passes x 2 layers x 2 operations a weight of 4 h^2 + 2 h f.
    linear = 3 * 2 * 2 * (4 * 64 + 2 * 8 * 32)
    quadratic = 3 * 2 * 2 * 8
    (one,) = texts(5)
    assert work.of(one) == 5 * linear + 25 * quadratic
    two = {"tokens": torch.zeros(2, 5, dtype=torch.long)}
    assert work.of(two) == 2 * work.of(one)


def test_texts_of_a_packed_row_attend_to_themselves_alone() -> None:
    work = batch_work(describe_model(argparse.Namespace(**SCRIPT)), argparse.Namespace(**SCRIPT))
    (row,) = texts(9)
    expected = work.text.linear * 9 + work.text.quadratic * (4 + 9 + 16)
    assert work.of({**row, "sequence_lengths": torch.tensor([2, 3, 4])}) == expected
    assert work.of({**row, "cu_seqlens": torch.tensor([[0, 2, 5, 9, 9, 9]], dtype=torch.int32)}) == expected


def test_pictures_are_counted_by_grids_by_patches_or_by_pixels() -> None:
    work = batch_work(describe_model(argparse.Namespace(**SCRIPT)), argparse.Namespace(**SCRIPT))
    work = type(work)(text=work.text, pictures=work.text, sounds=work.text)
    (plain,) = texts(5)
    alone = work.of(plain)
    expected = work.text.linear * 24 + work.text.quadratic * (16 + 400)
    assert work.of({**plain, "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 5]])}) == alone + expected
    patches = work.text.linear * 4 + work.text.quadratic * 16
    assert work.of({**plain, "pixel_values": torch.zeros(4, 588)}) == alone + patches
    assert work.of({**plain, "images": torch.zeros(1, 3, 28, 28)}) == alone + patches


def test_replicas_keep_their_number_of_microbatches_and_none_is_lost() -> None:
    draw = numpy.random.default_rng(3)
    works = draw.lognormal(0, 0.5, (4, 8)).tolist()
    found = share(works)
    assert sorted(place for row in found.places for place in row) == list(range(32))
    assert {len(row) for row in found.places} == {8}
    assert found.imbalance < 1.05 < found.imbalance_before and found.gap >= 0
    assert share(works) == found
    for row in found.places:
        times = [works[place // 8][place % 8] for place in row]
        # They rise and fall once.
        top = times.index(max(times))
        assert times[: top + 1] == sorted(times[: top + 1]) and times[top:] == sorted(times[top:], reverse=True)


def test_equal_microbatches_stay_where_they_are() -> None:
    assert share([[1.0] * 3] * 2).places == ((0, 1, 2), (3, 4, 5))


def test_a_step_that_trains_gets_another_order_and_evaluation_does_not() -> None:
    prepared(order_microbatches=True)
    seen: list[list[int]] = []

    def stock(**given: Any) -> str:
        given_iterators = given["data_iterator"]
        for iterator in given_iterators if isinstance(given_iterators, list) else [given_iterators]:
            taken = [next(iterator) for _ in range(given["num_microbatches"])]
            seen.append([batch["input_ids"].shape[1] for batch in taken])
        return "losses"

    step = schedule(lambda: stock, (), {})
    lengths = (9, 1, 5, 3, 7, 2)
    loader = iter(texts(*lengths, 4))
    assert step(data_iterator=loader, num_microbatches=6, forward_only=False) == "losses"
    assert seen[-1] == [1, 3, 7, 9, 5, 2]
    assert next(loader)["input_ids"].shape[1] == 4  # no microbatch of the next step was taken
    step(data_iterator=iter(texts(*lengths)), num_microbatches=6, forward_only=True)
    assert seen[-1] == list(lengths)
    # A loader of its own for each virtual stage: the same order.
    step(data_iterator=[iter(texts(*lengths)), iter(texts(*lengths))], num_microbatches=6, forward_only=False)
    assert seen[-1] == seen[-2] == [1, 3, 7, 9, 5, 2]


def test_without_the_flags_the_hosts_schedule_is_returned_itself() -> None:
    stock = object()
    assert schedule(lambda: stock, (), {}) is stock


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"order_microbatches": True, "auto_parallel_hetero": True}, "--order-microbatches cannot be combined with"),
        ({"data_balance": True, "use_gloo_process_groups": False}, "leave out --disable-gloo-process-groups"),
    ],
)
def test_settings_that_would_change_the_training_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepared(**flags)


@pytest.mark.parametrize(("batch", "words"), [([1], "gives list, not a dict"), ({"x": 1}, "but the loader gives x")])
def test_a_microbatch_without_sizes_is_named(batch: Any, words: str) -> None:
    work = prepared(order_microbatches=True).work
    assert work is not None
    with pytest.raises(ConfigError, match=words):
        work.of(batch)


def test_the_log_has_the_balance_of_the_batch() -> None:
    line = describe(share([[4.0, 4.0], [1.0, 1.0]]), True, 1.25)
    assert line == (
        "data balance: slowest replica 1.000 times the mean work (1.600 as loaded), 0.00% above the batch's bound, "
        "exchanged in 1.2 ms"
    )
