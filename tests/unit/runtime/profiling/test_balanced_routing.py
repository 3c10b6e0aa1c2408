"""Tokens of the native trainer's experts: evenly, or more of them for this rank's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.profiling import balanced_routing  # noqa: E402

pytestmark = pytest.mark.torch
STATE = "mindspeed_mm.fsdp.distributed.parallel_state"


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "size", "rank", "ratio", "share"),
    [
        (64, 8, 2, 4, 1, 1.0, 1.0),
        (64, 8, 2, 4, 1, 1.5, 1.5),
        (48, 16, 4, 4, 3, 2.25, 2.25),
        (64, 8, 4, 4, 0, 4.0, 2.0),  # a token chooses each of two experts once
        (64, 8, 2, 1, 0, 3.0, 1.0),  # all experts are this rank's
    ],
)
def test_the_dispatcher_gives_a_rank_its_share(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    experts: int,
    topk: int,
    size: int,
    rank: int,
    ratio: float,
    share: float,
) -> None:
    state, host = ModuleType(STATE), ModuleType("ep_dispatcher")
    groups = SimpleNamespace(get_group_size=lambda name: size, get_rank=lambda name: rank)
    state.get_parallel_state = lambda: groups  # type: ignore[attr-defined]
    host.force_ep_balance = host.FORCE_EP_BALANCE = None  # type: ignore[attr-defined]
    for number in range(STATE.count(".") + 1):
        name = ".".join(STATE.split(".")[: number + 1])
        monkeypatch.setitem(sys.modules, name, state if name == STATE else ModuleType(name))
    balanced_routing._balance_dispatcher(host, ratio)
    routed = torch.randint(0, experts, (tokens, topk), dtype=torch.int32)
    chosen = host.force_ep_balance(experts, routed)
    assert host.FORCE_EP_BALANCE and chosen.dtype == routed.dtype and chosen.shape == routed.shape
    assert all(len(set(row)) == topk for row in chosen.tolist())
    own = experts // size
    mine = ((chosen >= rank * own) & (chosen < (rank + 1) * own)).sum().item()
    assert mine == pytest.approx(share * tokens * topk * own / experts, abs=1)
    if share == 1:
        assert len(set(torch.bincount(chosen.flatten(), minlength=experts).tolist())) == 1


def test_a_release_without_the_switch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    balanced_routing._balance_dispatcher(ModuleType("ep_dispatcher"), 1.0)
    assert "has no MM_FORCE_EP_BALANCE" in capsys.readouterr().out
