"""Layers of the same structure that compute differently: windows of attention, positions left out, a list of one's own.

Nothing is read off names or flags: layers are one kind if they run the same operators on the same shapes, and the same
collectives. By which number something is scaled does not count: it takes as long with any.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.profiles.knowledge.signature import Call, SizeArgument, TensorArgument
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import Log

_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div"})
_FRACTION = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?|-?\d+e[+-]?\d+|-?Infinity|NaN")


def kinds_by_computing(stacks: Sequence[Stack], log: Log, run: Callable[[], object]) -> dict[str, tuple[int, ...]]:
    """Return the kind of every layer by stack, numbered as they appear. ``run``: the model's forward, written to
    ``log``."""
    found: dict[tuple[str, int], Any] = {}
    begun: dict[tuple[str, int], int] = {}
    known: set[Any] = set()

    def before(key: tuple[str, int]) -> Callable[..., None]:
        def hook(*unused: Any) -> None:
            begun[key] = len(log.operators)

        return hook

    def after(key: tuple[str, int]) -> Callable[..., None]:
        def hook(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
            work = _work_since(log, begun[key])
            if work not in known:
                # Masks and counters that are made once and kept are there the second time.
                begin = len(log.operators)
                layer.forward(*args, **kwargs)
                work = _work_since(log, begin)
                known.add(work)
            found[key] = work

        return hook

    handles = []
    for stack in stacks:
        for index, layer in enumerate(stack.layers):
            handles.append(layer.register_forward_pre_hook(before((stack.name, index))))
            handles.append(layer.register_forward_hook(after((stack.name, index)), with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {
        stack.name: _numbered([(kind, found[stack.name, index]) for index, kind in enumerate(stack.kinds)])
        for stack in stacks
    }


def _numbered(values: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def _work_since(log: Log, start: int) -> Hashable:
    operators = Counter(_work_of(operator) for operator in log.operators[start:] if operator is not None)
    collectives = Counter(call for place, call in log.collectives.items() if place >= start)
    return frozenset(operators.items()), frozenset(collectives.items())


def _work_of(operator: Operator) -> tuple[Any, ...]:
    """Return the call without the numbers that something is scaled by, whole ones in the operators of arithmetic
    only."""
    if operator.name.split(".")[1].rstrip("_") not in _ARITHMETIC:
        return operator.name, _FRACTION.sub("0.0", operator.signature.text), operator.sizes
    call, sizes = operator.signature.content, iter(operator.sizes)
    assert isinstance(call, Call)  # it was traced
    tensors = []
    for value in call.args:
        if isinstance(value, TensorArgument):
            tensors.append((value.dtype, *value.order, *[next(sizes) for _ in value.order]))
        elif isinstance(value, SizeArgument):
            next(sizes, None)
    return operator.name, *tensors
