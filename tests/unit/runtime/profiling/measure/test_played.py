"""The clock of a rank that is measured alone shows what its collectives would take, and nothing else."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.planner.tuner.pricing import collective_us  # noqa: E402
from mindspeed_autoparallel.profiles import Collective, LinkTier  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure.communication import CommunicationClock  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure.task import PlayedWorld  # noqa: E402

pytestmark = pytest.mark.torch

INTRA = LinkTier(default=Collective(latency_us=3.0, bytes_per_s=1e9))
INTER = LinkTier(default=Collective(latency_us=30.0, bytes_per_s=1e8))
WORLD = PlayedWorld(num_ranks=8, devices_per_node=4, tiers={"intra": INTRA, "inter": INTER}, links_from="a test")


def test_collectives_are_priced_by_the_links_of_their_ranks() -> None:
    import torch.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        inside, across = distributed.new_group([0, 1, 2, 3]), distributed.new_group([0, 4])
        alone = distributed.new_group([0])
        whole, part = torch.ones(1000, requires_grad=True), torch.zeros(250)
        with CommunicationClock(WORLD) as clock:
            (whole * 2).sum().backward()
            distributed.all_reduce(whole.detach(), group=alone)
            assert clock.clock() == 0
            distributed.all_reduce(part, group=inside)
            first = clock.clock()
            assert first * 1e6 == pytest.approx(collective_us("all_reduce", 1000, 4, INTRA))
            distributed.all_gather_into_tensor(whole.detach(), part, group=inside)
            second = clock.clock()
            assert (second - first) * 1e6 == pytest.approx(collective_us("all_gather", 4000, 4, INTRA))
            distributed.all_reduce(part, group=across)
            assert (clock.clock() - second) * 1e6 == pytest.approx(collective_us("all_reduce", 1000, 2, INTER))
    finally:
        distributed.destroy_process_group()
