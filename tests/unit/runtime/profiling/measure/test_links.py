"""Links between measuring processes: what is fitted to their times gives these times again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.cost.collectives import all_reduce_us, p2p_us  # noqa: E402
from mindspeed_autoparallel.profiles import Collective, LinkTier  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure import communication  # noqa: E402

pytestmark = pytest.mark.torch

TRUTH = LinkTier(default=Collective(latency_us=5.0, bytes_per_s=1e9))


def test_links_give_the_times_that_they_were_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def times(operation: Callable[[int], None], device: Any) -> list[tuple[int, float]]:
        is_reduction = operation.__name__ == "reduce"
        return [
            (size, all_reduce_us(size, 8, TRUTH) if is_reduction else p2p_us(size, TRUTH)) for size in (4096, 2**22)
        ]

    monkeypatch.setattr(communication, "_times", times)
    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        found = communication.measure_links(SimpleNamespace(), 4, "cpu")
    finally:
        distributed.destroy_process_group()
    assert set(found["inter"]) == {"p2p", "all_reduce"} and set(found["intra"]) == {"p2p"}
    for cost in (*found["inter"].values(), *found["intra"].values()):
        assert (cost.latency_us, cost.bytes_per_s) == pytest.approx((5.0, 1e9))
