"""Finds the repeated layers of a model of any class, and which of them differ in kind.

A stack is a ``ModuleList`` of two or more children that hold parameters and are of one class, or of classes derived
from one, such as layers with and without experts. A model module (image encoder, text decoder) is named after the first
part of the stack's path; pre is the part that runs before its first layer, post the part after its last.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.runtime.megatron.hybrid import (
    PATTERN_ARGUMENT,
    first_of_pattern,
    hybrid_pattern,
    set_pattern,
)
from mindspeed_autoparallel.spec.model import RESULT_KEYS

Choices = list[Any] | str
"""The choices of consecutive layers, or a hybrid model's pattern."""
MIN_LAYERS = 2
"""Fewest layers of a reduced model: with one layer, effects between layers would be invisible."""
_BY_LAYER = ("moe_layer_freq", "window_attn_skip_freq", "linear_attention_freq", "no_rope_freq")
"""Arguments of Megatron that list a choice per layer, or give the period of a choice in layers."""

_WRAPPERS = (
    "DDP",
    "DistributedDataParallel",
    "Float16Module",
    "FullyShardedDataParallel",
    "TorchFullyShardedDataParallel",
)
_PREDICTION = "mtp"
"""Layers of multi-token prediction run after the last layer, on the last stage: part of the stack's post block."""
_LETTERS = "layer_type_list"
"""Attribute of Megatron's hybrid stacks: a letter per layer; their layers have unrelated classes."""
_LANGUAGE_MODEL_STACKS = ("decoder", "transformer", "model", "language_model", "encoder")


def kinds_of(layers: Sequence[Any]) -> tuple[int, ...]:
    """Return the kind of every layer, numbered in the order they appear, by classes of submodules and shapes of
    parameters."""
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(_structure(layer), len(numbers)) for layer in layers)


def fewest_layers(kinds: Sequence[Hashable]) -> int:
    """Return the length of the shortest prefix that contains every kind."""
    return max([MIN_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))])


def choices_of_layers(arguments: argparse.Namespace, num_layers: int) -> tuple[Hashable, ...]:
    """Return the choice of Megatron's arguments for every layer: layers with equal choices are alike.

    A period of ``n`` layers counts as ``n`` different choices, regardless of its meaning; layers with different
    choices may still be of one kind.
    """
    if pattern := hybrid_pattern(arguments):
        return tuple(pattern[:num_layers])
    rows: list[Sequence[Any]] = []
    for name in _BY_LAYER:
        value = getattr(arguments, name, None)
        if isinstance(value, list) and len(value) >= num_layers:
            rows.append(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            rows.append([layer % value for layer in range(num_layers)])
    return tuple(tuple(row[layer] for row in rows) for layer in range(num_layers))


def choices_by_layer(arguments: argparse.Namespace) -> dict[str, Choices]:
    """Return the lists of choices per layer among Megatron's arguments, and a hybrid model's pattern."""
    lists = {name: value for name in _BY_LAYER if isinstance(value := getattr(arguments, name, None), list)}
    pattern = hybrid_pattern(arguments)
    return {**lists, **({PATTERN_ARGUMENT: pattern} if pattern else {})}


def shorten(arguments: argparse.Namespace, num_layers: int, choices: Mapping[str, Choices] | None = None) -> None:
    """Keep only the first ``num_layers`` layers in Megatron's arguments; longer lists of choices per layer are cut.

    ``choices``: the whole lists, if ``arguments`` were shortened before.
    """
    for name, value in (choices_by_layer(arguments) if choices is None else choices).items():
        if isinstance(value, str):
            set_pattern(arguments, first_of_pattern(value, num_layers))
        else:
            setattr(arguments, name, value[:num_layers])
    arguments.num_layers = num_layers
    for name in ("encoder_num_layers", "decoder_num_layers"):  # of a host with two models
        if getattr(arguments, name, None) is not None:
            setattr(arguments, name, num_layers)


def _structure(layer: Any) -> Any:
    return (
        tuple((name, type(module).__name__) for name, module in layer.named_modules()),
        tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
    )


@dataclass(frozen=True)
class Stack:
    """One repeated stack of layers of the built model."""

    name: str
    """Module name for display and files: ``image_encoder``, ``text_decoder``."""
    path: str
    """Dotted path of the ModuleList."""
    layers: tuple[Any, ...]
    top: Any
    """The module whose forward runs the stack and ends its post block; the model itself for a bare GPT."""
    kinds: tuple[int, ...]
    """Kind of every layer; the first layer's is 0."""

    @property
    def result_key(self) -> str:
        """Return ``vit``, ``llm``, ``audio``, or the module's name."""
        return RESULT_KEYS.get(self.name, self.name)

    @property
    def config(self) -> Any:
        """Return the layers' Megatron config, or None."""
        return getattr(self.layers[0], "config", None)

    @property
    def frozen(self) -> bool:
        """Return whether no parameter of the layers is trained."""
        return not any(parameter.requires_grad for layer in self.layers for parameter in layer.parameters())


def ties_embeddings(model: Any, arguments: Any) -> bool:
    """Return whether ``model`` shares its embedding with its output layer: by its modules, else by ``arguments``.

    The modules take precedence because MindSpeed-MM reads model.json, regardless of the flags.
    """
    said = (getattr(module, "share_embeddings_and_output_weights", None) for module in model.modules())
    found = next((value for value in said if value is not None), None)
    return not getattr(arguments, "untie_embeddings_and_output_weights", False) if found is None else bool(found)


def unwrap(model: Any) -> Any:
    """Return the host's model without DDP and precision wrappers; ``ProfileError`` if it has several chunks."""
    while isinstance(model, (list, tuple)):
        if len(model) != 1:
            raise ProfileError(f"the model is built as {len(model)} chunks; measuring needs one (no virtual stages).")
        model = model[0]
    while hasattr(model, "module") and type(model).__name__ in _WRAPPERS:
        model = model.module
    return model


def find_stacks(model: Any, kinds: Mapping[str, Sequence[int]] | None = None) -> tuple[Stack, ...]:
    """Return the stacks of ``model`` in the order of its children; raises ``ProfileError`` if it has none.

    ``kinds``: known kinds of each stack's layers, including layers that are not built. Otherwise layers with the same
    submodules and parameters are one kind.
    """

    def stack(name: str, path: str, layers: tuple[Any, ...], top: Any) -> Stack:
        known = tuple((kinds or {}).get(name, ()))[: len(layers)]
        return Stack(name, path, layers, top, known if len(known) == len(layers) else kinds_of(layers))

    found = [(path, layers) for path, layers in _module_lists(model) if path.split(".")[0] != _PREDICTION]
    if not found:
        raise ProfileError(
            f"{type(model).__name__} has no repeated layers (no ModuleList of two or more layers of one class), so it "
            "cannot be split over pipeline stages."
        )
    firsts = [path.split(".")[0] for path, _ in found]
    stacks = []
    for path, layers in found:
        first = path.split(".")[0]
        if len(found) == 1 and first in _LANGUAGE_MODEL_STACKS:
            stacks.append(stack("text_decoder", path, layers, model))
        elif firsts.count(first) == 1:
            stacks.append(stack(first, path, layers, getattr(model, first)))
        else:
            parent = path.rpartition(".")[0]
            stacks.append(stack(parent.replace(".", "_"), path, layers, model.get_submodule(parent)))
    return tuple(stacks)


def _module_lists(model: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    from torch.nn import ModuleList

    taken: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, ModuleList) or len(module) < 2:
            continue
        if any(path.startswith(f"{outer}.") for outer in taken):
            continue  # experts or blocks inside a layer
        parent = model.get_submodule(path.rpartition(".")[0])
        if (_are_alike(module) or hasattr(parent, _LETTERS)) and all(
            next(layer.parameters(), None) is not None for layer in module
        ):
            taken.append(path)
            yield path, tuple(module)


def _are_alike(modules: Iterable[Any]) -> bool:
    """Return whether all are of one class, or of classes derived from one of theirs."""
    classes = {type(module) for module in modules}
    return any(all(issubclass(other, one) for other in classes) for one in classes)
