"""Which layers compute alike, by what a forward on shapes ran between their boundaries."""

import pytest

pytest.importorskip("torch")

import torch

from mindspeed_autoparallel.profiles.knowledge import Operator, Signature
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack
from mindspeed_autoparallel.runtime.profiling.operator_calls import Collective
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import Log
from mindspeed_autoparallel.runtime.profiling.trace.layer_signatures import kinds_by_computing

TENSOR = '{"dtype":"bfloat16","order":[0,1]}'


def call(name, *others, sizes=(4, 8)):
    signature = Signature.of_json(f'[[{",".join([TENSOR, *others])}],{{"map":{{}}}}]')
    return Operator(name=f"aten.{name}.default", signature=signature, sizes=sizes)


class Layer(torch.nn.Module):
    """Runs these operators; ``once``: the first time only, whichever layer of the model is first."""

    def __init__(self, log, operators, collective=None, once=None):
        super().__init__()
        self.log, self.operators, self.collective, self.once = log, operators, collective, once or []

    def forward(self, value, *, more):
        while self.once:
            self.log.operators.append(self.once.pop())
        if self.collective is not None:
            self.log.collectives[len(self.log.operators)] = self.collective
            self.log.operators.append(None)
        self.log.operators += self.operators
        return value + more


def kinds(*layers, structure=None, collectives=(), once=()):
    """Of layers that ran these operators."""
    log, made_once = Log(), list(once)
    built = [
        Layer(log, operators, collectives[index] if collectives else None, made_once)
        for index, operators in enumerate(layers)
    ]
    stack = Stack("text", "layers", tuple(built), None, structure or (0,) * len(layers))

    def run():
        value = torch.zeros(2)
        for layer in built:
            value = layer(value, more=1)
        assert value.tolist() == [len(built)] * 2

    return kinds_by_computing([stack], log, run)["text"]


def test_layers_that_run_the_same_in_any_order_are_one_kind():
    a, b = call("mm"), call("softmax")
    assert kinds([a, b, None], [b, a], [a, None, b]) == (0, 0, 0)


def test_another_operator_another_size_or_one_more_call_is_another_kind():
    a = call("mm")
    assert kinds([a], [a, a], [call("mm", sizes=(4, 9))], [a], [call("bmm")]) == (0, 1, 2, 0, 3)


def test_a_window_is_another_kind_and_a_scale_is_not():
    assert kinds(
        [call("attend", '{"size":1}', sizes=(4, 8, 128))], [call("attend", '{"size":1}', sizes=(4, 8, 64))]
    ) == (0, 1)
    assert kinds([call("attend", "0.125")], [call("attend", "1e-05")]) == (0, 0)
    assert kinds([call("mul", "2")], [call("mul", "3")], [call("mul", '{"size":1}', sizes=(4, 8, 77))]) == (0, 0, 0)
    assert kinds([call("mul", "2")], [call("mul", "2", sizes=(4, 9))], [call("div", "2")]) == (0, 1, 2)


def test_structure_and_collectives_tell_kinds_apart_too():
    a = call("mm")
    assert kinds([a], [a], [a], structure=(0, 1, 0)) == (0, 1, 0)
    gather = Collective(name="all_gather", size_bytes=64, ranks=(0, 1))
    assert kinds([a], [a], [a], collectives=(None, gather, None)) == (0, 1, 0)


def test_tensors_that_the_first_layer_makes_for_all_form_no_kind_of_their_own():
    a, b = call("mm"), call("softmax")
    assert kinds([a], [a], [b], [a], once=[call("triu"), call("bitwise_not")]) == (0, 0, 1, 0)
