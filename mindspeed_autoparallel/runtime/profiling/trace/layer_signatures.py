"""Properties of the whole model from a trace: which layers compute alike, and whether it fits without recompute.

Names and flags are ignored: layers are one kind if they run the same operators on the same shapes, and the same
collectives. Scale factors are ignored: they do not change the time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.profiles.knowledge.signature import Call, SizeArgument, TensorArgument
from mindspeed_autoparallel.profiles.records import BlockTrace
from mindspeed_autoparallel.runtime.profiling.measure.structure import Stack
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import Log

_ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div"})
_FRACTION = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?|-?\d+e[+-]?\d+|-?Infinity|NaN")

_MOST_HELD = 3
"""Maximum of microbatches in flight times layers of a rank, over the layers of the model. 1F1B: ``P`` microbatches of
``ceil(L / P)`` layers are less than ``2 L``. Interleaved: fewer than ``(v + 1) P`` chunks of ``ceil(L / (P v))`` layers
are less than ``2 (v + 1) / v L``."""


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
                # Run it again: the first forward also creates masks and counters that later ones reuse.
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
    """Return the call without its scale factors; integers are dropped in arithmetic operators only."""
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


def fits_without_recompute(trace: BlockTrace, headroom_bytes: int) -> bool:
    """Return whether every split of the model into even stages fits ``headroom_bytes`` without recompute.

    The estimate is conservative: the whole model's state on one rank, unsharded, and as many activations as the deepest
    pipeline holds. No policy is faster than no recompute, so others need no trace if this returns True.
    """
    ratio = trace.bytes_per_trained_parameter
    total = float(trace.host_bytes + trace.workspace_bytes + trace.batch_bytes[0])
    for module in trace.modules:
        numbers = Counter(map(layer_block, module.kinds))
        blocks = module.blocks
        for name, block in blocks.items():
            state = sum(
                kind.parameter_bytes + kind.num_trained * (ratio.gradient + ratio.optimizer)
                for kind in (block.parameters.dense, block.parameters.expert)
            )
            total += state * numbers.get(name, 1)
        for name, number in numbers.items():
            held = blocks[name].saved_bytes + blocks[name].output_bytes + blocks["pre"].saved_bytes
            total += _MOST_HELD * number * (held + module.side_bytes[0])
        total += blocks["post"].saved_bytes
        total += max(max(block.forward_peak_bytes, block.backward_peak_bytes) for block in blocks.values())
    return total <= headroom_bytes
