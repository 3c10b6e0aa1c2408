"""Without in-place changes one trace is enough: it equals the second one."""

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.operators.torch import capture as capturing  # noqa: E402
from mindspeed_autoparallel.operators.torch import decompositions  # noqa: E402

pytestmark = pytest.mark.torch


class Changing(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        y.add_(1)
        return y @ x


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.two(torch.relu(self.one(x))).reshape(-1)


def traced_twice(monkeypatch, model, value):
    counted = []
    real = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda self, *given, **named: counted.append(1) or real(self, *given, **named),
    )
    return capturing.capture(model, (value,)), bool(counted)


def test_change_in_place_is_taken_apart_by_a_second_trace(monkeypatch):
    graph, twice = traced_twice(monkeypatch, Changing(), torch.ones(4, 4))
    assert twice and graph.unknown == {}


def test_plain_module_is_traced_once_with_the_same_operators(monkeypatch):
    graph, twice = traced_twice(monkeypatch, Plain(), torch.ones(4, 8))
    assert not twice
    monkeypatch.setattr(decompositions, "_needs_rewriting", lambda program: True)
    assert [n for n, node in capturing.capture(Plain(), (torch.ones(4, 8),)).nodes.items() if node.matmul] == [
        n for n, node in graph.nodes.items() if node.matmul
    ]
