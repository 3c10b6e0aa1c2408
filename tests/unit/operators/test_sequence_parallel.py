"""Sequence parallelism by styles: norms on pieces of the tokens, products gathered and scattered, or a reason."""

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.operators.lowering.uniform import TENSOR, uniform_decisions  # noqa: E402
from mindspeed_autoparallel.operators.plan import OperatorPlan  # noqa: E402
from mindspeed_autoparallel.operators.torch.capture import capture_program  # noqa: E402
from mindspeed_autoparallel.operators.torch.parallelize import nearest_styled, parallelize_plan  # noqa: E402
from mindspeed_autoparallel.operators.torch.sequence_parallel import with_sequence_parallel  # noqa: E402

pytestmark = pytest.mark.torch


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = torch.nn.LayerNorm(16), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def lowered(model, tokens=8):
    captured = capture_program(model, (torch.ones(4, tokens, 16),))
    decisions = uniform_decisions(captured.graph, (2,), (TENSOR,), sequence_parallel=False)
    plan, _ = nearest_styled(captured, model, OperatorPlan(decisions, "uniform", (), 0.0))
    return captured, parallelize_plan(captured, model, plan)


def test_layers_are_entered_in_pieces_and_left_whole():
    model = Model(3)
    captured, plain = lowered(model)
    found = with_sequence_parallel(captured, model, plain)
    assert found.not_expressed == ()
    names = {name: type(style).__name__ for name, style in found.styles.items()}
    for layer in range(3):
        assert names[f"layers.{layer}.norm"] == "SequenceParallel"
        assert names[f"layers.{layer}.mlp"] == "PrepareModuleInput"
        (out,) = found.styles[f"layers.{layer}.mlp.down"].output_layouts
        assert out.is_shard(1)
    assert names["layers.0"] == "PrepareModuleInput" and names["layers.2"] == "PrepareModuleOutput"
    assert "layers.1" not in names
    assert set(plain.styles) < set(names)  # the styles it was made of are as they were
    assert {type(style).__name__ for style in plain.styles.values()} == {"ColwiseParallel", "RowwiseParallel"}


def test_one_layer_is_entered_and_left_by_one_style():
    model = Model(1)
    found = with_sequence_parallel(*(lambda pair: (pair[0], model, pair[1]))(lowered(model)))
    assert type(found.styles["layers.0"]).__name__ == "PrepareModuleInputOutput"


def test_tokens_that_do_not_divide_and_models_without_layers_are_named():
    model = Model(2)
    captured, plain = lowered(model, tokens=7)
    found = with_sequence_parallel(captured, model, plain)
    assert found.styles == {}
    assert found.not_expressed == ("sequence parallelism: 7 tokens are not divided by 2 devices.",)
    captured, plain = lowered(alone := Mlp())
    assert "no repeated layers" in with_sequence_parallel(captured, alone, plain).not_expressed[0]
