"""A parallelized module run on the meta device with one rank's shapes: checks that its code works with cut sizes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Shard, parallel
from torch.utils import _pytree as pytree

from mindspeed_autoparallel.errors import first_line


def refusal_of_shapes(
    model: torch.nn.Module,
    example: tuple[Any, Any],
    styles: Mapping[str, parallel.ParallelStyle],
    parts: int,
    replicas: int,
) -> str:
    """Return why ``model`` does not run with one rank's shapes under ``styles`` on ``parts`` ranks; empty if it runs.

    ``example``: positional and named inputs of all ``replicas``. Nothing is computed: code that hard-codes the size of
    a cut dim fails by its shapes; code that reads sizes from tensors does not.
    """
    local = {name: _meta(value, _cut_dim(model, name, styles), parts) for name, value in model.named_parameters()}
    local.update({name: _meta(value, None, 1) for name, value in model.named_buffers()})
    arguments, keywords = pytree.tree_map(lambda given: _of_replica(given, replicas), example)
    with _shapes_as_styled(model, styles, parts):
        try:
            _export(_Local(model, local), arguments, keywords)
        except Exception as error:  # the model's own code can raise anything for an unexpected shape
            return first_line(error)
    return ""


def export_with(model: torch.nn.Module, example: tuple[Any, Any]) -> None:
    """Trace ``model`` with inputs of the shapes of ``example``, so that its hooks run; nothing is computed."""
    tensors = {name: _meta(value, None, 1) for name, value in (*model.named_parameters(), *model.named_buffers())}
    arguments, keywords = pytree.tree_map(lambda given: _of_replica(given, 1), example)
    _export(_Local(model, tensors), arguments, keywords)


def _export(module: torch.nn.Module, arguments: Any, keywords: Any) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # logs every shape that does not fit, with its stack
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        torch.export.export(module, arguments, keywords, strict=False)
    finally:
        logger.setLevel(level)


class _Local(torch.nn.Module):
    """A model with its tensors replaced."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self.tensors = model, tensors

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return torch.func.functional_call(self.model, self.tensors, arguments, keywords)


def _of_replica(given: Any, replicas: int) -> Any:
    if not isinstance(given, torch.Tensor):
        return given
    shape = (given.shape[0] // replicas, *given.shape[1:]) if given.dim() else given.shape
    return torch.empty(shape, dtype=given.dtype, device="meta")


def _cut_dim(model: torch.nn.Module, name: str, styles: Mapping[str, parallel.ParallelStyle]) -> int | None:
    """Return the dim of parameter ``name`` that the style of its module cuts; None if it stays whole."""
    module, _, kind = name.rpartition(".")
    style = styles.get(module)
    if not isinstance(style, (parallel.ColwiseParallel, parallel.RowwiseParallel)):
        return None
    if isinstance(model.get_submodule(module), torch.nn.Embedding):
        return 1 if isinstance(style, parallel.ColwiseParallel) else 0
    if isinstance(style, parallel.ColwiseParallel):
        return 0
    return 1 if kind == "weight" else None


def _meta(value: torch.Tensor, cut: int | None, parts: int) -> torch.Tensor:
    shape = list(value.shape)
    if cut is not None:
        shape[cut] //= parts
    return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


@contextlib.contextmanager
def _shapes_as_styled(
    model: torch.nn.Module, styles: Mapping[str, parallel.ParallelStyle], parts: int
) -> Iterator[None]:
    """Change shapes as styles redistribute tensors, at the entry and exit of styled modules."""
    handles = []
    for name, style in styles.items():
        module = model.get_submodule(name)
        table = isinstance(module, torch.nn.Embedding)

        def before(
            _: Any, given: tuple[Any, ...], named: Any, style: parallel.ParallelStyle = style, table: bool = table
        ) -> tuple[tuple[Any, ...], Any]:
            return _entered(given, named, style, parts, table)

        def after(_: Any, given: Any, made: Any, style: parallel.ParallelStyle = style) -> Any:
            return _left(made, style, parts)

        handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaled(value: torch.Tensor, layouts: Any, parts: int, *, grow: bool) -> torch.Tensor:
    layout = (layouts if isinstance(layouts, (tuple, list)) else (layouts,))[0]
    if not isinstance(layout, Shard):
        return value
    shape = list(value.shape)
    shape[layout.dim] = shape[layout.dim] * parts if grow else shape[layout.dim] // parts
    return value.new_empty(shape)


def _moved(value: Any, before: Any, after: Any, parts: int) -> Any:
    """Return a tensor of one rank's shape in layout ``after``; ``value`` itself if ``before`` is None."""
    if before is None:
        return value
    return _scaled(_scaled(value, before, parts, grow=True), after, parts, grow=False)


def _entered(
    given: tuple[Any, ...], named: Any, style: parallel.ParallelStyle, parts: int, table: bool
) -> tuple[tuple[Any, ...], Any]:
    if isinstance(style, parallel.PrepareModuleInputOutput):
        style = style.prepare_module_input
    if isinstance(style, parallel.PrepareModuleInput):
        pairs = zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True)
        layouts = [*pairs, *[(None, None)] * len(given)]
        moved = tuple(_moved(value, *pair, parts) for value, pair in zip(given, layouts, strict=False))
        before, after = style.input_kwarg_layouts or {}, style.desired_input_kwarg_layouts or {}
        return moved, {key: _moved(value, before.get(key), after.get(key), parts) for key, value in named.items()}
    if isinstance(style, parallel.ColwiseParallel):
        return (_scaled(given[0], style.input_layouts, parts, grow=True), *given[1:]), named
    if isinstance(style, parallel.RowwiseParallel) and not table:
        return (_moved(given[0], style.input_layouts, Shard(-1), parts), *given[1:]), named
    return given, named


def _left(made: Any, style: parallel.ParallelStyle, parts: int) -> Any:
    if isinstance(style, parallel.PrepareModuleInputOutput):
        style = style.prepare_module_output
    if isinstance(style, parallel.ColwiseParallel):
        return _moved(made, Shard(-1), style.output_layouts, parts)
    if isinstance(style, parallel.RowwiseParallel):
        return _scaled(made, style.output_layouts, parts, grow=False)
    if isinstance(style, parallel.PrepareModuleOutput):
        several = isinstance(made, (tuple, list))
        pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
        moved = [_moved(value, *pair, parts) for value, pair in zip(made if several else (made,), pairs, strict=True)]
        return tuple(moved) if several else moved[0]
    return made
