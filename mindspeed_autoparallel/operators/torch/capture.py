"""Capture of a PyTorch or megatron-core module as an operator graph, through ``torch.export``."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import Axis, Graph, Node
from mindspeed_autoparallel.operators.torch.aten_rules import Call, Rule, rule_of
from mindspeed_autoparallel.operators.torch.calls import CapturedCall, Slot

_REPEATED = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class Captured:
    """The graph of a module, and what is needed to run it piece by piece."""

    graph: Graph
    calls: dict[str, CapturedCall] = field(default_factory=dict)
    """By operator."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that are in the code, not in the module."""
    inputs: tuple[str, ...] = ()
    """Names of the inputs that are tensors, in order."""
    outputs: tuple[str, ...] = ()
    """Operators whose results the module returns."""


def capture(
    model: torch.nn.Module, example_inputs: tuple[Any, ...], example_keywords: dict[str, Any] | None = None
) -> Graph:
    """The operators of one forward; parameters by their names, operators by the module that calls them.

    Nothing is computed where parameters and inputs are on the meta device. Operators without a rule are listed in
    ``Graph.unknown`` and never cut. Layers of one list carry equal roles, so the search can tie them. Raises
    ``ConfigError`` where the module cannot be captured: the line of the model, and what to do.
    """
    return capture_program(model, example_inputs, example_keywords).graph


def capture_program(
    model: torch.nn.Module, example_inputs: tuple[Any, ...], example_keywords: dict[str, Any] | None = None
) -> Captured:
    """As ``capture``, with the calls behind the operators (see ``PlannedModule``)."""
    try:
        with _random_states_left_alone():
            program = torch.export.export(model, tuple(example_inputs), example_keywords, strict=False)
        if _needs_decomposition(program):
            program = program.run_decompositions({})
    except Exception as error:  # whatever the model's own code raises under tracing is told with its place
        raise ConfigError(_broken(model, error)) from error
    return _Builder(program).build()


def _needs_decomposition(program: Any) -> bool:
    """Whether a tensor is changed in place or an operator has no rule: otherwise a second trace tells nothing new."""
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            is_pointwise = torch.Tag.pointwise in node.target.tags
            if node.target._schema.is_mutable or rule_of(_short(node), is_pointwise) is None:
                return True
    return False


@contextlib.contextmanager
def _random_states_left_alone() -> Iterator[None]:
    """Megatron's dropout swaps generator states and compares their values; neither is an operator of the model."""
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    trackers = [
        kind
        for name in ("CudaRNGStatesTracker", "TECudaRNGStatesTracker")
        if (kind := getattr(random, name, None)) is not None and "fork" in vars(kind)
    ]
    before = [kind.fork for kind in trackers]
    for kind in trackers:
        kind.fork = lambda self, name="": contextlib.nullcontext()
    try:
        yield
    finally:
        for kind, fork in zip(trackers, before, strict=True):
            kind.fork = fork


def _broken(model: torch.nn.Module, error: BaseException) -> str:
    inside = str(Path(torch.__file__).parent)
    own = str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((inside, own, "<"))]
    place = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "its forward"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"capture of {type(model).__name__} breaks at {place}: {reason}. A graph cannot depend on values of tensors: "
        "use torch.where or torch.cond there, or move that code out of the module and capture what is left."
    )


class _Builder:
    def __init__(self, program: Any) -> None:
        self.program = program
        self.graph = Graph()
        self.captured = Captured(self.graph)
        self.named: dict[Any, str] = {}
        self.ordinals: dict[tuple[str, str], int] = {}

    def build(self) -> Captured:
        signature, captured = self.program.graph_signature, self.captured
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                name = held.get(node.name) or signature.inputs_to_lifted_tensor_constants.get(node.name, node.name)
                self._source(node, name, node.name in signature.inputs_to_parameters)
            elif node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
                self._operator(node)
        of_user = set(signature.user_inputs)
        captured.inputs = tuple(self.named[n] for n in self.named if n.op == "placeholder" and n.name in of_user)
        if captured.inputs:
            self.graph.samples = next(iter(self.graph.nodes[captured.inputs[0]].output_shape), 0)
        by_name = {node.name: name for node, name in self.named.items()}
        captured.outputs = tuple(by_name[name] for name in signature.user_outputs if name in by_name)
        for placeholder, constant in signature.inputs_to_lifted_tensor_constants.items():
            captured.constants[by_name[placeholder]] = self.program.constants[constant]
        return captured

    def _source(self, node: Any, name: str, parameter: bool) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        shape = _shape(value)
        axes = tuple(Axis(f"dim{d}", size) for d, size in enumerate(shape))
        self.named[node] = self.graph.add(
            Node(
                name,
                "parameter" if parameter else "input",
                axes,
                shape,
                tuple(range(len(shape))),
                role=_REPEATED.sub("*", name),
                item_bytes=value.element_size(),
                is_parameter=parameter,
                needs_gradient=parameter and value.is_floating_point(),
            )
        )

    def _operator(self, node: Any) -> None:
        value, path = node.meta["val"], _module_path(node)
        call = node.args[0] if _short(node) == "getitem" else node
        operator = _short(call)
        # A tensor used twice by one call (x * x) is two operands.
        tensors = [t for t in _tensor_arguments(call) if t in self.named]
        shapes = tuple(_shape(t.meta["val"]) for t in tensors)
        plain = tuple(None if isinstance(a, torch.fx.Node) else a for a in call.args)
        bias = operator == "linear" and len(tensors) == 3
        added = operator == "addmm" and not call.kwargs  # other factors than one are no rule's
        if added:
            tensors, bias = [*tensors[1:], tensors[0]], True
            shapes, operator = (*shapes[1:], shapes[0]), "mm"
        names = tuple(self.named[t] for t in tensors)
        is_pointwise = torch.Tag.pointwise in getattr(call.target, "tags", ())
        rule_for = rule_of(operator, is_pointwise)
        rule: Rule | None = None
        if rule_for is not None and all(isinstance(n, int) for shape in shapes for n in shape):
            try:
                rule = rule_for(Call(operator, shapes[:2] if bias else shapes, plain, _shape(value)))
            except (IndexError, TypeError, ValueError, AssertionError):
                rule = None  # a form of the operator the rule does not know: replicated and listed below
        name, role = self._name(path, operator, rule)
        gradient = value.is_floating_point() and any(self.graph.nodes[n].needs_gradient for n in names)
        if rule is None or (rule.operands and len(rule.operands) != len(names[:2] if bias else names)):
            blocked = Rule("unknown", (), tuple((None,) * len(s) for s in shapes), (None,) * value.dim())
            self.named[node] = self._add(name, role, blocked, names, value, gradient, str(call.target))
            self.captured.calls[self.named[node]] = _call_of(node, call, operator, tensors)
            return
        if not bias:
            self.named[node] = self._add(name, role, rule, names if rule.operands else (), value, gradient)
            self.captured.calls[self.named[node]] = _call_of(node, call, operator, tensors)
            return
        # A bias inside a product whose inner axis is cut would be added once per part, so it is an operator of its own.
        product = self._add(name, role, rule, names[:2], value, gradient)
        multiply = torch.ops.aten.mm.default if added else torch.ops.aten.linear.default
        self.captured.calls[product] = CapturedCall(operator, multiply, (Slot(0), Slot(1)), {})
        shape = _shape(value)
        dims = tuple(range(len(shape)))
        axes = tuple(Axis(f"dim{d}", size) for d, size in enumerate(shape))
        plus = Rule("pointwise", axes, (dims, dims[-1:]), dims)
        self.named[node] = self._add(f"{name}.bias_add", f"{role}.bias_add", plus, (product, names[2]), value, gradient)
        self.captured.calls[self.named[node]] = CapturedCall("add", torch.add, (Slot(0), Slot(1)), {})

    def _name(self, path: str, operator: str, rule: Rule | None) -> tuple[str, str]:
        number = self.ordinals.get((path, operator), 0)
        self.ordinals[path, operator] = number + 1
        own = path and rule is not None and rule.matmul is not None and number == 0 and path not in self.graph.nodes
        name = path if own else ".".join(p for p in (path, operator) if p) + (f"_{number}" if number else "")
        while name in self.graph.nodes:
            name += "_"
        return name, _REPEATED.sub("*", name)

    def _add(
        self, name: str, role: str, rule: Rule, inputs: tuple[str, ...], value: Any, gradient: bool, unknown: str = ""
    ) -> str:
        return self.graph.add(
            Node(
                name,
                rule.kind,
                rule.axes,
                _shape(value),
                rule.output,
                inputs,
                rule.operands,
                role=role,
                item_bytes=value.element_size(),
                flops=rule.flops,
                needs_gradient=gradient,
                matmul=rule.matmul,
                known=not unknown,
                kind_detail=unknown,
            )
        )


def _call_of(node: Any, call: Any, operator: str, tensors: list[Any]) -> CapturedCall:
    """The call with a slot for each tensor, numbered in the order of ``tensors``."""
    numbers = iter(range(len(tensors)))
    known = set(tensors)
    args, keywords = torch.fx.map_arg((call.args, call.kwargs), lambda n: Slot(next(numbers)) if n in known else n)
    index = node.args[1] if call is not node else None
    return CapturedCall(operator, call.target, args, dict(keywords), index)


def _short(node: Any) -> str:
    name = getattr(node.target, "_schema", None)
    return str(name.name).split("::")[-1] if name is not None else getattr(node.target, "__name__", str(node.target))


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in value.shape)


def _tensor_arguments(call: Any) -> list[Any]:
    found: list[Any] = []
    torch.fx.map_arg((call.args, call.kwargs), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _module_path(node: Any) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return re.sub(r"^L\['self'\]\.?|\[(\d+)\]", lambda m: f".{m.group(1)}" if m.group(1) else "", path)
