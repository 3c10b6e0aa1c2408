"""Modules are captured with their operators by name, and searched."""

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.errors import ConfigError  # noqa: E402
from mindspeed_autoparallel.operators import search_strategies  # noqa: E402
from mindspeed_autoparallel.operators.search.pricing import Machine  # noqa: E402
from mindspeed_autoparallel.operators.search.problem import build_problem  # noqa: E402
from mindspeed_autoparallel.operators.search.state import Decisions  # noqa: E402
from mindspeed_autoparallel.operators.torch.capture import capture  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.out, self.up = torch.nn.Linear(width, width), torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Tiny(torch.nn.Module):
    def __init__(self, layers=3, width=32):
        super().__init__()
        self.table = torch.nn.Embedding(64, width)
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 64, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(batch=8):
    return (torch.zeros(batch, 16, dtype=torch.int64),)


def test_products_carry_the_names_of_their_modules_and_all_parameters_are_there():
    model = Tiny()
    graph = capture(model, tokens())
    products = [name for name, node in graph.nodes.items() if node.matmul]
    assert products == [*(f"layers.{n}.{part}" for n in range(3) for part in ("qkv", "out", "up", "down")), "head"]
    held = {n for n, node in graph.nodes.items() if node.is_parameter}
    assert held == {name for name, _ in model.named_parameters()} and graph.unknown == {}


def test_repeated_layers_are_tied():
    graph = capture(Tiny(layers=5), tokens())
    problem = build_problem(Decisions(graph, (), dict.fromkeys(graph.nodes, ())), 2, Machine(), {}, tied=True)
    together = next(names for names in problem.members if "layers.0.up" in names)
    assert together == [f"layers.{n}.up" for n in range(5)]


@pytest.mark.parametrize("mode", ["recursive_programming", "exact"])
def test_module_is_cut_by_its_batch_where_nothing_needs_more(mode):
    plan = search_strategies(Tiny(), tokens(64), devices=8, search_mode=mode)
    assert {next(iter(parts)) for parts in plan.degrees().values()} == {"rows0"} or mode == "exact"
    assert all(len(choice) == 3 for choice in plan.decisions.choices.values())


def test_pinned_module_keeps_its_pin_in_every_mode():
    pins = {"layers.*.up": {"columns": 4}}
    for mode in ("recursive_programming", "sharding_propagation", "exact"):
        plan = search_strategies(Tiny(), tokens(), devices=4, search_mode=mode, pins=pins)
        assert [plan.degrees()[f"layers.{n}.up"] for n in range(3)] == [{"columns": 4}] * 3


def test_meta_parameters_are_never_computed():
    with torch.device("meta"):
        model, given = Tiny(width=4096), tokens()
    assert sum(n.output_bytes for n in capture(model, given).nodes.values() if n.is_parameter) > 2**30


def test_operator_without_a_rule_is_named_replicated_and_listed():
    class Odd(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x) @ x

    plan = search_strategies(Odd(), (torch.eye(8),), devices=2)
    (name,) = (n for n, kind in plan.decisions.graph.unknown.items() if "inv" in kind)
    assert plan.decisions.graph.nodes[name].choices(2) == [-1]
    assert any("inv" in note and "replicated" in note for note in plan.notes)


def test_a_branch_on_a_value_is_refused_with_its_line_and_a_way_out():
    class Branching(torch.nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x * 2
            return x

    with pytest.raises(
        ConfigError, match=r"Branching breaks at .*test_capture.py:\d+ \(if x.sum\(\) > 0:\).*torch.where"
    ):
        capture(Branching(), (torch.ones(4),))
