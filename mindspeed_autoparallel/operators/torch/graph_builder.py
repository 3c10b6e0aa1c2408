"""An exported program as an operator graph, with the calls of its operators."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import Axis, Graph, Node
from mindspeed_autoparallel.operators.rules.products import source
from mindspeed_autoparallel.operators.torch.calls import DRAWN_WHOLE, CapturedCall, Slot, draws
from mindspeed_autoparallel.operators.torch.decompositions import short_name
from mindspeed_autoparallel.operators.torch.rules.base import TENSOR, Call, Rule
from mindspeed_autoparallel.operators.torch.rules.table import BLOCKED_SLOTS, NO_GRADIENT, rule_of

_REPEATED = re.compile(r"(?<![^.])\d+(?![^.])")
_BIASED = {"linear": -1, **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), 1)}
_BIASED.update(dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 1))
"""Products that may add a bias, and the output dim that the bias spans."""


@dataclass
class Captured:
    """The graph of a module, and the data to run it piece by piece."""

    graph: Graph
    calls: dict[str, CapturedCall] = field(default_factory=dict)
    """Calls by operator."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that are constants in the code, neither parameters nor buffers."""
    inputs: tuple[str, ...] = ()
    """Names of the inputs that are tensors, in order."""
    outputs: tuple[str | None, ...] = ()
    """Operators whose results the module returns; None for other values."""
    plain_outputs: tuple[Any, ...] = ()
    """Returned values other than tensors, by position."""
    structure: Any = None
    """Nesting of the module's results."""
    example: tuple[Any, Any] = ((), {})
    """The inputs of the capture, positional and named."""
    updates: dict[str, str] = field(default_factory=dict)
    """Buffers that a forward changes, and the operator that computes their new value."""
    changed_inputs: dict[str, str] = field(default_factory=dict)
    """Inputs that a forward changes in place, and the operator that computes their new value."""
    depends_on_mode: bool = False
    """Whether evaluation may compute something else: the forward draws random numbers or changes a buffer."""
    causes: list[str] = field(default_factory=list)
    """Code that changes gradients without being an operator, with its line."""
    training: tuple[bool, ...] = ()
    """Training mode of every submodule."""
    is_compared: bool = False
    """Whether results and gradients were compared with the module's (``compare``)."""


class GraphBuilder:
    """Builds the graph of one exported ``program`` of ``model``."""

    def __init__(self, program: Any, model: torch.nn.Module) -> None:
        self.program = program
        self.graph = Graph()
        self.captured = Captured(self.graph)
        self.named: dict[Any, str] = {}
        self.ordinals: dict[tuple[str, str], int] = {}
        self.first_name: dict[str, str] = {}
        self.trained: dict[str, bool] = {}
        seen: dict[int, str] = {}
        for name, value in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            self.first_name[name] = seen.setdefault(id(value), name)
            self.trained[name] = value.requires_grad
        self.captured.training = tuple(module.training for module in model.modules())

    def build(self) -> Captured:
        """Add sources and operators in the program's order, then record inputs and outputs."""
        signature, captured = self.program.graph_signature, self.captured
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                name = held.get(node.name) or signature.inputs_to_lifted_tensor_constants.get(node.name, node.name)
                self._source(node, self.first_name.get(name, name), node.name in signature.inputs_to_parameters)
            elif node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
                self._operator(node)
        of_user = set(signature.user_inputs)
        captured.inputs = tuple(self.named[n] for n in self.named if n.op == "placeholder" and n.name in of_user)
        if captured.inputs:
            self.graph.samples = next(iter(self.graph.nodes[captured.inputs[0]].output_shape), 0)
        by_name = {node.name: name for node, name in self.named.items()}
        self._outputs(signature, by_name)
        captured.updates = {
            self.first_name.get(buffer, buffer): by_name[name] for name, buffer in signature.buffers_to_mutate.items()
        }
        captured.changed_inputs = {by_name[n]: by_name[name] for name, n in signature.user_inputs_to_mutate.items()}
        for placeholder, constant in signature.inputs_to_lifted_tensor_constants.items():
            if by_name.get(placeholder) in self.graph.nodes:
                captured.constants[by_name[placeholder]] = self.program.constants[constant]
        captured.depends_on_mode = bool(captured.updates) or any(call.is_random for call in captured.calls.values())
        self.graph.keep_live_gradients(dict.fromkeys(name for name in captured.outputs if name))
        return captured

    def _outputs(self, signature: Any, by_name: dict[str, str]) -> None:
        """Record what the module returns, in the order of its flattened outputs."""
        wanted = [spec for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT"]
        self.captured.outputs = tuple(by_name.get(getattr(spec.arg, "name", "")) for spec in wanted)
        self.captured.plain_outputs = tuple(getattr(spec.arg, "value", None) for spec in wanted)
        self.captured.structure = self.program.call_spec.out_spec
        self.captured.example = self.program.example_inputs

    def _source(self, node: Any, name: str, parameter: bool) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or (not node.users and name in self.first_name):
            return
        self.named[node] = name
        if name in self.graph.nodes:
            return  # a parameter under its second name
        shape = _shape(value)
        role, item_bytes = _REPEATED.sub("*", name), value.element_size()
        frozen = not (_has_gradient(value) and self.trained.get(name, True))
        self.graph.add(source(name, shape, parameter=parameter, frozen=frozen, role=role, item_bytes=item_bytes))

    def _operator(self, node: Any) -> None:
        value, path = node.meta["val"], _module_path(node)
        call = node.args[0] if short_name(node.target) == "getitem" else node
        operator = short_name(call.target)
        if isinstance(call.target, torch._ops.HigherOrderOperator):
            raise ConfigError(
                f"{path or 'the module'} runs torch's {operator}, whose branches do not fit into one graph: use "
                "torch.where, or move that code out of the module and capture the rest."
            )
        # A tensor used twice by one call (x * x) is two operands.
        tensors = [t for t in _tensor_arguments(call) if t in self.named]
        plain = torch.fx.map_arg(call.args, lambda n: TENSOR if n in self.named else None)
        along = _BIASED.get(operator)
        bias = along is not None and len(tensors) == 3
        # Only without factors alpha and beta, and with a vector, is the added tensor a bias.
        added = operator == "addmm" and not call.kwargs and len(_shape(tensors[0].meta["val"])) == 1
        if added:
            tensors, bias, operator, along = [*tensors[1:], tensors[0]], True, "mm", -1
        main = tensors[:2] if bias else tensors
        rule = self._rule(call, operator, main, plain, node)
        name, role = self._name(path, operator, rule)
        names = tuple(self.named[t] for t in tensors)
        if rule is None or (rule.operands and len(rule.operands) != len(main)):
            shapes = [_shape(t.meta["val"]) for t in tensors]
            blocked = Rule("unknown", (), tuple((None,) * len(s) for s in shapes), (None,) * value.dim())
            self._add(node, name, role, blocked, names, str(call.target))
            self.captured.calls[self.named[node]] = _call_of(node, call, operator, tensors)
        elif not bias:
            self._add(node, name, role, rule, names if rule.operands else ())
            self.captured.calls[self.named[node]] = _call_of(node, call, operator, tensors, constant=not rule.operands)
        else:
            # The bias is a separate operator: inside the product, a cut inner axis would add it once per part.
            self._add(node, name, role, rule, names[:2])
            product = self.named[node]
            self.captured.calls[product] = _without_bias(call, operator, added)
            self._add_bias(node, along or 0, (product, names[2]), f"{name}.bias_add", f"{role}.bias_add")

    def _rule(self, call: Any, operator: str, tensors: list[Any], plain: Any, node: Any) -> Rule | None:
        """Apply the operator's rule; None for an unsupported form of the operator."""
        rule_for = rule_of(operator, torch.Tag.pointwise in getattr(call.target, "tags", ()))
        output = node.meta["val"].shape
        shapes = tuple(tuple(t.meta["val"].shape) for t in tensors)
        if operator not in DRAWN_WHOLE and draws(call.target, operator, call.args):
            return None  # pieces would draw other numbers than the whole
        if operator.startswith("index") and any(t.meta["val"].dtype == torch.bool for t in tensors[1:]):
            return None  # a mask spans dims of its tensor, unlike indices
        if rule_for is None or not all(isinstance(n, int) for shape in (*shapes, output) for n in shape):
            return None
        index = node.args[1] if call is not node else 0
        try:
            return rule_for(Call(operator, shapes, plain, tuple(output), index))
        except (IndexError, KeyError, TypeError, ValueError, AssertionError, StopIteration):
            return None

    def _name(self, path: str, operator: str, rule: Rule | None) -> tuple[str, str]:
        number = self.ordinals.get((path, operator), 0)
        self.ordinals[path, operator] = number + 1
        own = path and rule is not None and rule.matmul is not None and number == 0 and path not in self.graph.nodes
        name = path if own else ".".join(p for p in (path, operator) if p) + (f"_{number}" if number else "")
        while name in self.graph.nodes:
            name += "_"
        return name, _REPEATED.sub("*", name)

    def _add(self, node: Any, name: str, role: str, rule: Rule, inputs: tuple[str, ...], unknown: str = "") -> None:
        value, operator = node.meta["val"], short_name(node.target)
        flows = any(self.graph.nodes[n].needs_gradient for n in inputs) and operator not in NO_GRADIENT
        self.named[node] = self.graph.add(
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
                needs_gradient=flows and _has_gradient(value),
                matmul=rule.matmul,
                known=not unknown,
                kind_detail=unknown,
                blocked_slots=BLOCKED_SLOTS.get(operator, frozenset()),
            )
        )

    def _add_bias(self, node: Any, along: int, inputs: tuple[str, str], name: str, role: str) -> None:
        """Add the bias ``inputs[1]`` along dim ``along`` of the product ``inputs[0]``."""
        shape = _shape(node.meta["val"])
        dims = tuple(range(len(shape)))
        axes = tuple(Axis(f"dim{d}", size) for d, size in enumerate(shape))
        rule = Rule("pointwise", axes, (dims, (dims[along],)), dims)
        self._add(node, name, role, rule, inputs)
        trailing = len(shape) - 1 - dims[along]

        def plus(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return product + bias.view(-1, *(1,) * trailing)

        self.captured.calls[self.named[node]] = CapturedCall("add", plus, (Slot(0), Slot(1)), {})


def _without_bias(call: Any, operator: str, added: bool) -> CapturedCall:
    if added:
        return CapturedCall(operator, torch.ops.aten.mm.default, (Slot(0), Slot(1)), {})
    return CapturedCall(operator, call.target, (Slot(0), Slot(1), None, *call.args[3:]), dict(call.kwargs))


def _call_of(node: Any, call: Any, operator: str, tensors: list[Any], *, constant: bool = False) -> CapturedCall:
    """Make the call with a slot for each tensor, numbered in the order of ``tensors``.

    A ``constant`` reads no tensor: an empty one replaces an argument of which it uses only the dtype.
    """
    numbers = iter(range(len(tensors)))
    known = set(tensors)

    def slot(n: Any) -> Any:
        if n not in known:
            return n
        return torch.empty(0, dtype=n.meta["val"].dtype) if constant else Slot(next(numbers))

    args, keywords = torch.fx.map_arg((call.args, call.kwargs), slot)
    index = node.args[1] if call is not node else None
    layout = None
    if tensors:
        first = tensors[0].meta["val"]
        layout = (tuple(first.shape), tuple(first.stride()))
    return CapturedCall(operator, call.target, tuple(args), dict(keywords), index, layout)


def _has_gradient(value: torch.Tensor) -> bool:
    return bool(value.is_floating_point() or value.is_complex())


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
