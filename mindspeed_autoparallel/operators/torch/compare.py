"""Compare a captured module with the module itself: one forward and backward of each, on the inputs of the capture.

``torch.export`` traces the forward only. Code that changes gradients directly (the backward of a custom
``autograd.Function``, hooks of tensors, parameters and modules) leaves no operator, so a plan would train a different
model. The module's results and gradients are the reference; a difference is an error that lists its possible causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from mindspeed_autoparallel.errors import ConfigError, first_line
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.torch.calls import SHAPES
from mindspeed_autoparallel.operators.torch.causes import functions_behind, written_at
from mindspeed_autoparallel.operators.torch.draws import SEED, SameDraws, kept_generators
from mindspeed_autoparallel.operators.torch.graph_builder import Captured

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3, torch.complex128: 1e-6}
_LOW_PRECISION = 0.1
_GOLDEN = 0.6180339887498949
_NOISE = 1e-2
"""Share of the largest value below which values may be rounding errors of zero."""


def compare(captured: Captured, model: torch.nn.Module) -> None:
    """Raise ``ConfigError`` if the capture computes other results or gradients than ``model``.

    ``model`` must hold values. Its parameters, buffers and gradients, and all random generators, are restored.
    """
    arguments, keywords = pytree.tree_map_only(torch.Tensor, _with_values, captured.example)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    flows = ObservedFlows()
    with kept_generators(), torch.enable_grad(), SameDraws():
        _check_accumulate_hooks(model)
        eager, right, of_inputs = _of_module(model, (arguments, keywords), [*trained.values()])
        captured.causes += functions_behind(eager)
        given, floats = _leaves((arguments, keywords), of_inputs)
        # Copies without the hooks that parameters may have.
        own = {name: value.detach().requires_grad_(value.requires_grad) for name, value in model.named_parameters()}
        try:
            made = _tensors(_run(captured, {**own, **dict(model.named_buffers())}, given, flows))
            found = _gradients(made, [*(own[name] for name in trained), *floats])
        except RuntimeError as error:
            reason = first_line(error)
            raise ConfigError(f"{type(model).__name__} cannot be run from its capture: {reason}") from error
    _check([f"result {place}" for place in range(len(eager))], eager, made, captured, model)
    names = [
        *(f"the gradient of {name}" for name in trained),
        *(f"the gradient of input {i}" for i in range(len(floats))),
    ]
    _check(names, right, found, captured, model)
    flows.correct(captured.graph, dict.fromkeys(name for name in captured.outputs if name))
    captured.is_compared = True


def _of_module(model: torch.nn.Module, given: Any, trained: list[torch.Tensor]) -> tuple[Any, Any, bool]:
    """Return the results of ``model`` for ``given``, the gradients of ``trained`` parameters and of the inputs, and
    whether inputs take a gradient. Some modules change inputs in place, or have no derivative for them."""
    buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
    for of_inputs in (True, False):
        copied, floats = _leaves(given, of_inputs)
        try:
            eager = _tensors(model(*copied[0], **copied[1]))
            _check_dense(eager)
            return eager, _gradients(eager, [*trained, *floats]), of_inputs
        except Exception as error:  # any error of the model's own code
            if not of_inputs:
                raise ConfigError(
                    f"{type(model).__name__} cannot be trained as it is: its own forward and backward end with: "
                    f"{first_line(error)}"
                ) from error
        finally:
            with torch.no_grad():
                for name, value in model.named_buffers():
                    value.copy_(buffers[name])
    raise AssertionError("one of the two ways returns or raises")


def _check_dense(made: list[torch.Tensor]) -> None:
    for value in made:
        if value.layout != torch.strided:
            raise TypeError(f"it returns a tensor of layout {value.layout}, and plans cut dense tensors only.")


def has_values(captured: Captured, model: torch.nn.Module) -> bool:
    """Return whether parameters, buffers and example inputs hold values: none is on the meta device or fake."""
    held = (*model.parameters(), *model.buffers(), *_tensors(captured.example))
    return not any(value.is_meta or isinstance(value, FakeTensor) for value in held)


def _run(captured: Captured, held: Mapping[str, torch.Tensor], given: Any, flows: ObservedFlows) -> Any:
    """Return the results of the captured operators on whole tensors; ``held``: parameters and buffers."""
    tensors = [value for value in pytree.tree_leaves(given) if isinstance(value, torch.Tensor)]
    made = {**held, **captured.constants, **dict(zip(captured.inputs, tensors, strict=True))}
    for name, node in captured.graph.nodes.items():
        if name in captured.calls:
            call = captured.calls[name]
            inputs = [flows.watched(name, slot, made[source]) for slot, source in enumerate(node.inputs)]
            if call.operator in SHAPES:  # as a plan runs them: the input may have another memory layout
                made[name] = inputs[0].reshape(node.output_shape)
            else:
                made[name] = inputs[0].detach() if call.operator == "stop_gradient" else call.run(*inputs)
    return [made[name] for name in captured.outputs if name is not None]


def _check(
    names: list[str], right: list[torch.Tensor | None], found: list[torch.Tensor | None], captured: Captured, model: Any
) -> None:
    """Raise ``ConfigError`` for the first pair that differs by more than its precision allows."""
    sizes = [_largest(value) for value in right if value is not None]
    floor = _NOISE * max(sizes, default=0.0)
    for name, expected, value in zip(names, right, found, strict=True):
        if expected is None and value is None:
            continue
        difference = _difference(expected, value, floor)
        if difference <= _tolerance(expected if expected is not None else value):
            continue
        causes = "; ".join(dict.fromkeys(captured.causes)) or (
            "no hook and no autograd.Function was found: an operator of it is captured wrongly"
        )
        raise ConfigError(
            f"{type(model).__name__} cannot be run from its capture: {name} is {difference:.0%} off what the module "
            f"itself computes. Cause: {causes}. A capture keeps only operators of the forward: write that part with "
            "operators that have the intended derivative, or distribute the parts around it."
        )


def _tolerance(value: Any) -> float:
    return _TOLERANCES.get(value.dtype, _LOW_PRECISION)


def _difference(expected: torch.Tensor | None, value: torch.Tensor | None, floor: float) -> float:
    """Return the largest difference relative to the largest of ``expected`` and ``floor``, among finite values."""
    if expected is None or value is None:
        there = value if expected is None else expected
        assert there is not None
        return float(_largest(there) > floor)
    if expected.shape != value.shape:
        return float("inf")
    right, other = expected.detach(), value.detach()
    if not (right.is_floating_point() or right.is_complex()):
        return float((right != other).any())
    finite = torch.isfinite(right)
    if not bool(finite.any()):
        return 0.0
    largest = max(_largest(right), floor)
    difference = float((right[finite] - other[finite]).abs().nan_to_num(float("inf")).max())
    return difference / largest if largest > 0 else float(difference > 0)


def _largest(value: torch.Tensor) -> float:
    """Return the largest finite magnitude in ``value``; 0 if it has none."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    sizes = value.detach().abs()
    sizes = sizes[torch.isfinite(sizes)]
    return float(sizes.max()) if sizes.numel() else 0.0


def _gradients(made: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of ``wanted`` for a sum of the elements of ``made`` with different weights."""
    total = None
    for value in made:
        if not value.requires_grad:
            continue
        # Not drawn at random: SameDraws makes draws constant, and equal weights cancel after a norm.
        places = torch.arange(value.numel(), device=value.device, dtype=torch.float64)
        numbers = ((places * _GOLDEN) % 1 + 0.5).reshape(value.shape).to(value.real.dtype)
        term = (torch.view_as_real(value.resolve_conj()).sum(-1) if value.is_complex() else value) * numbers
        total = term.sum() if total is None else total + term.sum()
    if total is None or not wanted:
        return [None for _ in wanted]
    before = [value.grad for value in wanted]
    try:
        for value in wanted:
            value.grad = None
        total.backward()  # not autograd.grad, which checkpoints with use_reentrant=True refuse
        return [value.grad for value in wanted]
    finally:
        for value, gradient in zip(wanted, before, strict=True):
            value.grad = gradient


def _tensors(made: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(made) if isinstance(value, torch.Tensor)]


def _leaves(given: Any, of_inputs: bool) -> tuple[Any, list[torch.Tensor]]:
    """Return a copy of the inputs, and the leaves of those that take a gradient (none without ``of_inputs``)."""
    leaves: list[torch.Tensor] = []

    def copied(value: torch.Tensor) -> torch.Tensor:
        leaf = value.detach().clone()
        if not of_inputs or not (value.is_floating_point() or value.is_complex()):
            return leaf
        leaves.append(leaf.requires_grad_())
        return leaf.clone()  # may be changed in place

    return pytree.tree_map_only(torch.Tensor, copied, given), leaves


def _with_values(value: torch.Tensor) -> torch.Tensor:
    if not value.is_meta:
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=torch.Generator().manual_seed(SEED)).to(value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)


def _check_accumulate_hooks(model: torch.nn.Module) -> None:
    """Raise ``ConfigError`` for post-accumulate hooks: distributed parameters are new and would lack them."""
    for name, parameter in model.named_parameters():
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            raise ConfigError(
                f"{type(model).__name__} cannot be run from its capture: {name} has a post-accumulate-grad hook, "
                f"{written_at(hook)}, which its distributed parameter would not have. Register it after "
                "distribute_plan."
            )


class ObservedFlows:
    """Records which inputs of which operators receive a gradient in a backward.

    The table of operators can be wrong (the overwritten side of a copy, an argument without a derivative); a plan would
    then predict messages that are not sent, or miss some that are.
    """

    def __init__(self) -> None:
        self.arrived: set[tuple[str, int]] = set()

    def watched(self, name: str, slot: int, value: torch.Tensor) -> torch.Tensor:
        """Return a view of ``value`` for input ``slot`` of operator ``name`` that records the arrival of a gradient."""
        if not value.requires_grad:
            return value
        seen = value.view_as(value)
        seen.register_hook(lambda _: self.arrived.add((name, slot)))
        return seen

    def correct(self, graph: Graph, outputs: Iterable[str]) -> None:
        """Write the observations into ``graph``; ``outputs``: operators whose results the module returns."""
        for name, node in graph.nodes.items():
            if not node.inputs:
                continue
            blocked = frozenset(slot for slot in range(len(node.inputs)) if (name, slot) not in self.arrived)
            flows = any(
                graph.nodes[source].needs_gradient for slot, source in enumerate(node.inputs) if slot not in blocked
            )
            graph.nodes[name] = replace(node, needs_gradient=flows, blocked_slots=blocked)
        graph.keep_live_gradients(outputs)
