"""Find code that changes a module's gradients without being an operator of it, with file and line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def noting_causes(model: torch.nn.Module) -> Iterator[list[str]]:
    """Yield a list of the hooks of ``model``, with file and line; tensor hooks that the block registers are added."""
    causes = _hooks_of(model)
    register = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        causes.append(f"a tensor hook, registered at {_place()}")
        return register(tensor, hook)

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield causes
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]


def _hooks_of(model: torch.nn.Module) -> list[str]:
    """Return the backward hooks of modules and parameters, each with its source line."""
    found = []
    for path, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            found.append(f"a backward hook of module {path or type(module).__name__}, {written_at(hook)}")
    for name, parameter in model.named_parameters():
        for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
            found.append(f"a hook of parameter {name}, {written_at(hook)}")
    return found


def functions_behind(made: list[torch.Tensor]) -> list[str]:
    """Return every custom ``autograd.Function`` that computed ``made``, with the line of its backward."""
    found: list[str] = []
    pending = [value.grad_fn for value in made if value.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        kind = getattr(node, "_forward_cls", None)
        if kind is not None:
            found.append(f"the backward of {kind.__name__}, {written_at(kind.backward)}")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def written_at(hook: Any) -> str:
    code = getattr(hook, "__code__", None) or getattr(getattr(hook, "__func__", None), "__code__", None)
    return f"written at {code.co_filename}:{code.co_firstlineno}" if code is not None else f"a {type(hook).__name__}"


def _place() -> str:
    """Return the currently running line outside torch and this file."""
    inside = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith((inside, __file__, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
