"""What styles cannot say of a plan is named with its operator, and no styles are given then."""

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Replicate, Shard  # noqa: E402

from mindspeed_autoparallel.operators import search_graph  # noqa: E402
from mindspeed_autoparallel.operators.torch.capture import capture_program  # noqa: E402
from mindspeed_autoparallel.operators.torch.parallelize import parallelize_plan  # noqa: E402

pytestmark = pytest.mark.torch
PINS = {"q": {"columns": 4}, "o": {"inner": 4}}


class Pair(torch.nn.Module):
    """Two products; ``size`` is how the code between them writes the width of what it reshapes."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.q, self.o = torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.o(torch.relu(self.q(x).view(x.shape[0], self.size)))


def lowered(size, pins=PINS, mode="recursive_programming"):
    model = Pair(size)
    captured = capture_program(model, (torch.ones(8, 16),))
    return parallelize_plan(captured, model, search_graph(captured.graph, 4, pins=pins, search_mode=mode))


def test_products_get_styles_by_their_cuts():
    found = lowered(-1)
    assert found.not_expressed == () and (found.data_size, found.tensor_size) == (1, 4)
    assert [type(style).__name__ for style in found.styles.values()] == ["ColwiseParallel", "RowwiseParallel"]
    assert found.styles["q"].input_layouts == (Replicate(),) and found.styles["o"].input_layouts == (Shard(1),)


def test_size_of_a_cut_dim_that_the_code_writes_out_is_named():
    found = lowered(16)
    assert found.styles == {}
    (told,) = found.not_expressed
    assert told.startswith("forward: it does not run with one rank's shapes: ") and "'[8, 16]'" in told


def test_operator_cut_in_two_ways_is_named():
    found = lowered(-1, {"q": {"columns": 2, "inner": 2}, "o": {"columns": 4}})
    assert any(line.startswith("q: it is cut by columns and inner") for line in found.not_expressed)


def test_module_called_twice_is_named():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(16, 16)

        def forward(self, x):
            return self.q(self.q(x))

    captured = capture_program(model := Twice(), (torch.ones(8, 16),))
    found = parallelize_plan(captured, model, search_graph(captured.graph, 4, pins={"q": {"columns": 4}}))
    assert any("called more than once" in line for line in found.not_expressed)
