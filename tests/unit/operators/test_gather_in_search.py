"""A gather that no product reaches is cut by the search as the published oracles say."""

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.operators import search_strategies  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("table", "index", "cuts"), [((64, 64), (64, 64), {"rows0": 8}), ((1024, 128), (2, 1024), {"rows0": 2, "table": 4})]
)
def test_search_cuts_the_index_first_then_the_table(table, index, cuts):
    plan = search_strategies(
        torch.nn.Embedding(*table), (torch.zeros(index, dtype=torch.int64),), devices=8, mem_coeff=0.1
    )
    (name,) = (n for n, node in plan.decisions.graph.nodes.items() if node.kind == "gather")
    found = {}
    for axis, parts in plan.decisions.cuts(name):
        label = plan.decisions.graph.nodes[name].axes[axis].name
        found[label] = found.get(label, 1) * parts
    assert found == cuts


class Entries(torch.nn.Module):
    """Numbers of a one-dim table by index."""

    def __init__(self, size):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(size))

    def forward(self, index):
        return self.table[index]


def test_table_of_one_dim_is_never_cut_and_its_index_as_far_as_it_divides():
    plan = search_strategies(Entries(128), (torch.zeros(4, dtype=torch.int64),), devices=8, mem_coeff=0.1)
    assert plan.decisions.graph.unknown == {}
    (name,) = (n for n, node in plan.decisions.graph.nodes.items() if node.kind == "gather")
    assert [plan.decisions.graph.nodes[name].axes[axis].name for axis, _ in plan.decisions.cuts(name)] == ["rows0"] * 2
    assert plan.decisions.cuts("table") == ()
