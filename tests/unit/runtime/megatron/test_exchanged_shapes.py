"""Shapes that a rank alone takes for those its neighbours would send."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron import exchanged_shapes
from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
from mindspeed_autoparallel.runtime.state import of_process

pytestmark = pytest.mark.torch

NOTHING = [0, 0, 0]


@pytest.fixture(params=["function", "method"])
def communicate(request, monkeypatch):
    """Return ``_communicate_shapes(send_next, recv_prev, recv_next)`` of 0.12, and of later releases."""
    monkeypatch.setenv(ALONE_VARIABLE, "4")
    monkeypatch.setattr(of_process(exchanged_shapes._Running), "schedules", [exchanged_shapes._Schedule()])
    config = SimpleNamespace()
    if request.param == "function":
        module = SimpleNamespace(_communicate_shapes=None)
        exchanged_shapes._replace(module)
        return lambda sent, prev, behind: module._communicate_shapes(sent, None, prev, behind, config)

    class P2PCommunicator:
        pass

    communicator: Any = P2PCommunicator()
    communicator.config = config
    exchanged_shapes._replace(SimpleNamespace(P2PCommunicator=P2PCommunicator))
    return lambda sent, prev, behind: communicator._communicate_shapes(sent, None, prev, behind)


def test_gradients_have_the_shapes_of_what_was_sent_in_the_order_of_1f1b(communicate):
    activations = [(5, 1, 8), (3, 1, 8), (7, 1, 8)]
    with exchanged_shapes.arriving(lambda: activations):
        assert communicate(None, True, False) == ([5, 1, 8], NOTHING)
        assert communicate(torch.empty(10, 1, 4), True, False) == ([3, 1, 8], NOTHING)
        assert communicate(torch.empty(6, 1, 4), False, True) == (NOTHING, [10, 1, 4])
        assert communicate(None, True, False) == ([7, 1, 8], NOTHING)
        assert communicate(torch.empty(14, 1, 4), False, True) == (NOTHING, [6, 1, 4])
        assert communicate(None, False, True) == (NOTHING, [14, 1, 4])
        with pytest.raises(ConfigError, match="before any activation"):
            communicate(None, False, True)


def test_a_schedule_inside_another_leaves_the_outer_ones_shapes(communicate):
    with exchanged_shapes.arriving(lambda: [(1, 1, 1), (2, 1, 1)]):
        communicate(torch.empty(4, 1, 1), True, False)
        with exchanged_shapes.arriving(lambda: [(9, 1, 1)]):
            assert communicate(torch.empty(8, 1, 1), True, False) == ([9, 1, 1], NOTHING)
        assert communicate(None, True, True) == ([2, 1, 1], [4, 1, 1])


def test_shapes_are_computed_only_where_a_rank_is_alone(monkeypatch):
    monkeypatch.delenv(ALONE_VARIABLE, raising=False)
    with exchanged_shapes.arriving(lambda: pytest.fail("computed")):
        pass
