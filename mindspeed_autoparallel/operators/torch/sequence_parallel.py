"""Sequence parallelism by styles of ``parallelize_module``: between products, ranks hold pieces of the tokens.

Styles apply at the entry and exit of modules. The input of the first layer is cut by tokens and the output of the last
one is gathered, so code around the layers gets whole tensors. Inside, norms run on pieces, and products gather before
and scatter after. A trace of the model, which computes nothing, records which tensor enters which module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import Replicate, Shard, parallel

from mindspeed_autoparallel.operators.torch.dry_run import export_with, refusal_of_shapes
from mindspeed_autoparallel.operators.torch.graph_builder import Captured
from mindspeed_autoparallel.operators.torch.parallelize import ParallelizePlan

_LAYER = re.compile(r"(.*)\.(\d+)")
_TOKENS = Shard(1)


@dataclass
class _ModuleCall:
    """A call of a module: tensors by position and name, and its result."""

    positional: tuple[Any, ...]
    named: dict[str, object]
    made: Any
    times: int = 1


def with_sequence_parallel(captured: Captured, model: torch.nn.Module, lowered: ParallelizePlan) -> ParallelizePlan:
    """Return ``lowered`` with sequence parallelism in the stack of repeated layers that has most of its styles.

    ``model`` is the module that was captured, in whole shapes. Gradients of norms are pending sums over the mesh, as
    torch's ``SequenceParallel`` leaves them. If styles cannot express it, the result has no styles, and
    ``not_expressed`` has the reason.
    """
    if lowered.not_expressed:
        return lowered
    styles, reason = _Stack(captured, model, lowered).styles()
    if not reason:
        reason = refusal_of_shapes(model, captured.example, styles, lowered.tensor_size, lowered.data_size)
    if reason:
        return replace(lowered, styles={}, not_expressed=(f"sequence parallelism: {reason}",))
    return replace(lowered, styles=styles)


class _Stack:
    """The repeated layers of one model, and the styles that cut the tensors between them by tokens."""

    def __init__(self, captured: Captured, model: torch.nn.Module, lowered: ParallelizePlan) -> None:
        self.model, self.lowered = model, lowered
        self.given = dict(lowered.styles)
        self.calls = _record_calls(model, captured.example)
        self.layers = self._layers()
        self.shape: tuple[int, ...] = ()

    def styles(self) -> tuple[dict[str, parallel.ParallelStyle], str]:
        """Return (styles, empty string), or (empty dict, the reason why there are none)."""
        if not self.layers:
            return {}, "no repeated layers with styles that hand one tensor to the next."
        stream = _first_stream(self.calls[self.layers[0]])
        assert stream is not None
        self.shape = tuple(stream.shape)
        if self.shape[1] % self.lowered.tensor_size:
            return {}, f"{self.shape[1]} tokens are not divided by {self.lowered.tensor_size} devices."
        for layer in self.layers:
            self._inside(layer)
        first, last = self.layers[0], self.layers[-1]
        entry = _entry(self.calls[first], self.shape, Replicate(), _TOKENS)
        leaving = _leaving(self.calls[last], self.shape, _TOKENS, Replicate())
        if first == last:
            self.given[first] = parallel.PrepareModuleInputOutput(**entry, use_local_input=True, **leaving)
        else:
            self.given[first] = parallel.PrepareModuleInput(**entry, use_local_output=True)
            self.given[last] = parallel.PrepareModuleOutput(**leaving)
        return self.given, ""

    def _layers(self) -> list[str]:
        """List the modules of the chain with most styles; each is called once, with the result of the previous one."""
        chains: dict[str, list[str]] = {}
        for name in self.calls:
            found = _LAYER.fullmatch(name)
            if found and any(style.startswith(f"{name}.") for style in self.given):
                chains.setdefault(found[1], []).append(name)
        chains = {prefix: names for prefix, names in chains.items() if self._is_chain(names)}
        held = {prefix: sum(s.startswith(f"{prefix}.") for s in self.given) for prefix in chains}
        return chains[max(held, key=lambda prefix: (held[prefix], -len(prefix)))] if chains else []

    def _is_chain(self, names: list[str]) -> bool:
        for name, following in zip(names, [*names[1:], ""], strict=True):
            call = self.calls[name]
            if call.times > 1 or _first_stream(call) is None or _first(call.made) is None:
                return False
            if following and _first_stream(self.calls[following]) is not _first(call.made):
                return False
        return True

    def _inside(self, name: str) -> None:
        """Add styles for the children of module ``name``, or for their children."""
        for child, module in self.model.get_submodule(name).named_children():
            path = f"{name}.{child}"
            if path not in self.calls or not any(True for _ in module.parameters()):
                if any(True for _ in module.parameters()):
                    self._inside(path)
                continue
            style = self.given.get(path)
            call = self.calls[path]
            takes_stream = _first_stream(call, self.shape) is not None
            inside = [key for key in self.given if key.startswith(f"{path}.")]
            if isinstance(style, parallel.RowwiseParallel):
                self.given[path] = parallel.RowwiseParallel(
                    input_layouts=style.input_layouts[0], output_layouts=_TOKENS
                )
            elif isinstance(style, parallel.ColwiseParallel) and takes_stream:
                self.given[path] = parallel.ColwiseParallel(
                    input_layouts=_TOKENS, output_layouts=style.output_layouts[0]
                )
            elif style is None and takes_stream and self._is_norm(path, module):
                self.given[path] = parallel.SequenceParallel(use_local_output=True)
            elif style is None and takes_stream and not inside:
                entry = _entry(call, self.shape, _TOKENS, Replicate())
                leaving = _leaving(call, self.shape, Replicate(), _TOKENS)
                self.given[path] = parallel.PrepareModuleInputOutput(**entry, use_local_input=True, **leaving)
            elif style is None and takes_stream and self._only_styled(path, module, inside):
                entry = _entry(call, self.shape, _TOKENS, Replicate())
                self.given[path] = parallel.PrepareModuleInput(**entry)
                for key in inside:
                    if isinstance(rowwise := self.given[key], parallel.RowwiseParallel):
                        self.given[key] = parallel.RowwiseParallel(
                            input_layouts=rowwise.input_layouts[0], output_layouts=_TOKENS
                        )
            else:
                self._inside(path)

    def _is_norm(self, path: str, module: torch.nn.Module) -> bool:
        """Return whether a module can run on a piece of the tokens: its parameters are vectors, and it takes and
        returns one tensor."""
        made = self.calls[path].made
        given = [v for v in (*self.calls[path].positional, *self.calls[path].named.values()) if _is_tensor(v)]
        vectors = all(p.dim() == 1 for p in module.parameters())
        return vectors and len(given) == 1 and _is_tensor(made) and tuple(made.shape) == self.shape

    def _only_styled(self, path: str, module: torch.nn.Module, inside: list[str]) -> bool:
        """Return whether styles inside a module cover all its parameters, and one of them cuts by columns."""
        owners = {f"{path}.{name}".rpartition(".")[0] for name, _ in module.named_parameters()}
        return owners <= set(inside) and any(isinstance(self.given[key], parallel.ColwiseParallel) for key in inside)


def _record_calls(model: torch.nn.Module, example: tuple[Any, Any]) -> dict[str, _ModuleCall]:
    calls: dict[str, _ModuleCall] = {}
    handles = []
    for name, module in model.named_modules():

        def after(_: Any, positional: tuple[Any, ...], named: dict[str, object], made: Any, name: str = name) -> None:
            times = calls[name].times + 1 if name in calls else 1
            calls[name] = _ModuleCall(positional, dict(named), made, times)

        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        export_with(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _first(made: Any) -> Any:
    """Return the tensor that a module returns, or the first of a tuple; None for anything else."""
    first = made[0] if isinstance(made, (tuple, list)) and made else made
    return first if _is_tensor(first) else None


def _first_stream(call: _ModuleCall, shape: tuple[int, ...] = ()) -> Any:
    """Return the first tensor of samples, tokens and width (of ``shape``, if given) that a module was called with."""
    for value in (*call.positional, *call.named.values()):
        if _is_tensor(value) and value.dim() == 3 and (not shape or tuple(value.shape) == shape):
            return value
    return None


def _entry(call: _ModuleCall, shape: tuple[int, ...], before: Any, after: Any) -> dict[str, object]:
    """Return the arguments of a style that takes the tensors of ``shape`` from ``before`` to ``after``."""
    streams = [_is_tensor(v) and tuple(v.shape) == shape for v in call.positional]
    named = [key for key, v in call.named.items() if _is_tensor(v) and tuple(v.shape) == shape]
    positional = {
        "input_layouts": tuple(before if stream else None for stream in streams) or None,
        "desired_input_layouts": tuple(after if stream else None for stream in streams) or None,
    }
    return {
        **(positional if any(streams) else {}),
        **({"input_kwarg_layouts": dict.fromkeys(named, before)} if named else {}),
        **({"desired_input_kwarg_layouts": dict.fromkeys(named, after)} if named else {}),
    }


def _leaving(call: _ModuleCall, shape: tuple[int, ...], before: Any, after: Any) -> dict[str, object]:
    made = call.made if isinstance(call.made, (tuple, list)) else (call.made,)
    streams = [_is_tensor(v) and tuple(v.shape) == shape for v in made]
    return {
        "output_layouts": tuple(before if stream else None for stream in streams),
        "desired_output_layouts": tuple(after if stream else None for stream in streams),
        "use_local_output": True,
    }
