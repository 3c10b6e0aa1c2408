"""The items of all ranks in one message, which grows with what a step needs."""

import types
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.errors import ConfigError  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import LocalItem  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.exchange import ItemGather, items_of_replicas, local_items  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Item  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def alone():
    """A group of this process only."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def items(count):
    return [
        Item(i, 4 * i + 4, i + 1, i * 0.5, (1, i, 2), None if i % 2 else i, 64, dp_replica=0, microbatch=i // 3)
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [0, 2, 300, 5])
def test_every_field_of_every_item_arrives(alone, count):
    clips = [Item(1, 8, 2, 3.25, dp_replica=0, microbatch=0)]
    assert ItemGather(alone).gather([items(count), clips], [3, 0], "cpu") == [items(count), clips]


def test_only_the_first_large_step_takes_a_second_message(alone, monkeypatch):
    calls = []
    send = torch.distributed.all_gather_into_tensor

    def counting(*args, **kwargs):
        calls.append(args[1].numel())
        return send(*args, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", counting)
    gather = ItemGather(alone)
    for _ in range(2):
        gather.gather([items(100)], [3], "cpu")
    assert len(calls) == 3
    assert calls[1] == calls[2] > calls[0]


def test_an_item_without_rows_names_its_sample():
    adapter = types.SimpleNamespace(items=lambda batch: batch)
    with pytest.raises(ConfigError, match=r"sample 7 of microbatch 1 .* 4 input and 0 output rows"):
        local_items(adapter, [[], [LocalItem(7, 4, 0, 1.0)]], 0)


def test_a_rank_alone_takes_its_own_items_for_those_of_every_replica():
    own = items(3)
    found = items_of_replicas(own, (0, 2))
    assert [item.dp_replica for item in found] == [0, 0, 0, 2, 2, 2]
    assert [replace(item, dp_replica=0) for item in found] == own + own
