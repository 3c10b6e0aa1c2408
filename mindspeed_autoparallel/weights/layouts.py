"""Layouts: the layers of each module in each pipeline stage and virtual chunk, and its tensor-parallel size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.architecture import AUDIO, MODULES, TEXT, VISION, Architecture
from mindspeed_autoparallel.weights.names import Rule

FLAG_OF_MODULE = {VISION: "--vit-pp-layers", AUDIO: "--audio-pp-layers", TEXT: "--llm-pp-layers"}
TP_FLAG_OF_MODULE = {VISION: "--vit-tp-size", AUDIO: "--audio-tp-size", TEXT: "--tp-size"}


@dataclass(frozen=True, kw_only=True)
class ModuleLayout:
    """``layers[virtual chunk][pipeline rank]``: number of layers. Model order runs over ranks, then virtual chunks.

    ``replicated``: every pipeline stage's file has the whole module (encoders under their own layout).
    """

    layers: tuple[tuple[int, ...], ...]
    tensor_size: int = 1
    replicated: bool = False

    def start_of(self, virtual: int, stage: int) -> int:
        """Return the index of the first layer of a chunk, counted over the whole module."""
        flat = [count for row in self.layers for count in row]
        return list(accumulate(flat, initial=0))[virtual * len(self.layers[0]) + stage]

    def filled_chunks(self) -> list[tuple[int, int]]:
        """Return (virtual, stage) of the chunks that have layers, in the order of the model."""
        return [(virtual, stage) for virtual, row in enumerate(self.layers) for stage, count in enumerate(row) if count]


@dataclass(frozen=True, kw_only=True)
class CheckpointLayout:
    """A layout per module. ``vocab_multiple``: the embedding is padded to a multiple of this times the tensor size;
    None: not padded. ``expert_size``: parts of the list of experts; ``expert_tensor_size``: parts of each expert, None
    for as many as of the text module."""

    modules: Mapping[str, ModuleLayout]
    vocab_multiple: int | None = None
    expert_size: int = 1
    expert_tensor_size: int | None = None

    @property
    def pipeline_size(self) -> int:
        return len(self.modules[TEXT].layers[0])

    @property
    def virtual_size(self) -> int:
        return len(self.modules[TEXT].layers)

    def chunk_key(self, virtual: int) -> str:
        """Return the key under which a rank's file has a virtual chunk."""
        return "model" if self.virtual_size == 1 else f"model{virtual}"

    @property
    def tensor_size(self) -> int:
        """Number of files per stage: the largest of the modules' sizes; a module with a smaller size repeats its
        shards."""
        return max(module.tensor_size for module in self.modules.values())

    def size_of(self, rule: Rule) -> int:
        """Return the number of parts into which the tensor of ``rule`` is cut."""
        if rule.per_expert and self.expert_tensor_size is not None:
            return self.expert_tensor_size
        return self.modules[rule.module].tensor_size

    def rank_files(self) -> list[tuple[int, int]]:
        """Return (tensor rank, expert rank) of every file of a pipeline stage.

        Megatron numbers a stage's ranks tensor rank first, and expert tensor rank before expert rank: with an expert
        tensor size below the tensor size not every pair of numbers belongs to a rank.
        """
        width, expert_width = self.tensor_size, self.expert_tensor_size or self.tensor_size
        period = math.lcm(width, expert_width * self.expert_size)
        return sorted({(rank % width, rank // expert_width % self.expert_size) for rank in range(period)})

    def padded_vocab(self, vocab_size: int) -> int:
        if self.vocab_multiple is None:
            return vocab_size
        multiple = self.vocab_multiple * self.modules[TEXT].tensor_size
        return -(-vocab_size // multiple) * multiple


def parse_layers(text: str, flag: str) -> tuple[tuple[int, ...], ...]:
    """Return ``32,0,0``, ``[32,0,0]`` or, with virtual stages, ``[[16,0],[16,0]]``; ``ConfigError`` names the flag."""
    try:
        value: Any = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except (ValueError, RecursionError):
        value = None
    rows = value if isinstance(value, list) and value and all(isinstance(row, list) for row in value) else [value]
    plain = all(
        isinstance(row, list) and row and all(type(count) is int and count >= 0 for count in row) for row in rows
    )
    if not plain or len({len(row) for row in rows}) != 1:
        raise ConfigError(
            f"{flag} {text[:60]!r} is not a list of layer counts. Write 32,0,0 (one count per pipeline stage) or, "
            "with virtual stages, [[16,0],[16,0]] (one list per virtual chunk, all of the same length)."
        )
    return tuple(tuple(row) for row in rows)


def make_layout(
    architecture: Architecture,
    *,
    layers: Mapping[str, tuple[tuple[int, ...], ...] | None],
    tensor_sizes: Mapping[str, int | None],
    vocab_multiple: int | None = None,
    hetero: bool = False,
    expert_size: int = 1,
    expert_tensor_size: int | None = None,
) -> CheckpointLayout:
    """Return a checked layout. Missing text layers mean one stage; missing encoder layers mean all in the first stage.

    ``tensor_sizes[text]`` is the default of the other modules. ``hetero``: encoders are in every stage's file.
    """
    text_shape = architecture.modules[TEXT]
    text_layers = layers.get(TEXT) or ((text_shape.num_layers,),)
    num_virtual, num_stages = len(text_layers), len(text_layers[0])
    modules = {}
    for module in MODULES:
        given = layers.get(module)
        shape = architecture.modules.get(module)
        if shape is None:
            if given and any(count for row in given for count in row):
                raise ConfigError(f"{FLAG_OF_MODULE[module]} given, but {architecture.family} has no {module} module.")
            continue
        if module == TEXT:
            rows = text_layers
        elif given is None or hetero:
            if given:
                _check_sum(module, given, shape.num_layers)
            rows = tuple(
                tuple(shape.num_layers if (virtual, stage) == (0, 0) else 0 for stage in range(num_stages))
                for virtual in range(num_virtual)
            )
        else:
            rows = given
        tensor_size = tensor_sizes.get(module) or tensor_sizes.get(TEXT) or 1
        modules[module] = ModuleLayout(layers=rows, tensor_size=tensor_size, replicated=hetero and module != TEXT)
    layout = CheckpointLayout(
        modules=modules, vocab_multiple=vocab_multiple, expert_size=expert_size, expert_tensor_size=expert_tensor_size
    )
    check_layout(layout, architecture)
    return layout


def check_layout(layout: CheckpointLayout, architecture: Architecture) -> None:
    """Raise ``ConfigError`` with the list, size or number that does not fit, and the difference."""
    text = layout.modules[TEXT].layers
    # Text first: the other modules inherit its tensor size.
    for module, placed in sorted(layout.modules.items(), key=lambda item: item[0] != TEXT):
        shape = architecture.modules[module]
        _check_sum(module, placed.layers, shape.num_layers)
        if (len(placed.layers), len(placed.layers[0])) != (len(text), len(text[0])):
            raise ConfigError(
                f"{FLAG_OF_MODULE[module]} has {len(placed.layers)} virtual chunk(s) of {len(placed.layers[0])} stages "
                f"and --llm-pp-layers {len(text)} of {len(text[0])}. Give every module the same number; 0 is allowed."
            )
        _check_divisible(module, placed.tensor_size, shape.num_heads, "attention heads")
        _check_divisible(module, placed.tensor_size, shape.num_query_groups, "query groups (key-value heads)")
        _check_divisible(module, placed.tensor_size, shape.ffn_size, "rows of its feed-forward layer")
        if layout.tensor_size % placed.tensor_size:
            raise ConfigError(
                f"{TP_FLAG_OF_MODULE[module]} {placed.tensor_size} does not divide the largest size, "
                f"{layout.tensor_size}. Choose sizes that divide one another."
            )
    _check_experts(layout, architecture)
    _check_rules(layout, architecture)
    if architecture.is_text_only and not (text[0][0] and text[-1][-1]):
        raise ConfigError(
            f"--llm-pp-layers {[list(row) for row in text]}: Megatron has the embedding on the first stage and the "
            "final norm and output layer on the last, and loads them from nowhere else. Give both at least one layer."
        )
    text_size = layout.modules[TEXT].tensor_size
    if layout.padded_vocab(architecture.vocab_size) % text_size:
        raise ConfigError(
            f"a vocabulary of {architecture.vocab_size} cannot be cut into {text_size} equal parts "
            f"({architecture.vocab_size % text_size} rows are left over). Pad it with "
            "--make-vocab-size-divisible-by 1 (and give training the same), or choose another --tp-size."
        )


def _check_experts(layout: CheckpointLayout, architecture: Architecture) -> None:
    num_experts = architecture.modules[TEXT].num_experts
    if num_experts and num_experts % layout.expert_size:
        fitting = [size for size in range(1, num_experts + 1) if num_experts % size == 0][:8]
        raise ConfigError(
            f"--ep-size {layout.expert_size} does not divide {num_experts} experts. Sizes that fit: "
            f"{', '.join(map(str, fitting))}."
        )
    if layout.expert_tensor_size is not None and layout.tensor_size % layout.expert_tensor_size:
        raise ConfigError(
            f"--etp-size {layout.expert_tensor_size} does not divide the tensor parallel size {layout.tensor_size}: a "
            "file of that tensor rank would hold several ranks' experts. Choose a size that divides it."
        )


def _check_rules(layout: CheckpointLayout, architecture: Architecture) -> None:
    """Raise ``ConfigError`` for the first tensor that the layout cannot cut into equal parts."""
    for rule in architecture.rules:
        size = layout.size_of(rule)
        if rule.split not in (names.ROWS, names.COLUMNS) or size == 1:
            continue
        dimension = rule.shapes[0][-1] if rule.split == names.COLUMNS else rule.shapes[0][0]
        if rule.combine.startswith("transpose"):
            dimension = rule.shapes[0][0] if rule.split == names.COLUMNS else rule.shapes[0][-1]
        counts = (rule.groups,) if rule.groups > 1 else rule.sections or (dimension,)
        for count in counts:
            if count % size:
                flag = "--etp-size" if rule.per_expert else TP_FLAG_OF_MODULE[rule.module]
                raise ConfigError(
                    f"{flag} {size} does not divide {count} of {rule.target}. Choose a size that divides it."
                )


def _check_sum(module: str, rows: Sequence[Sequence[int]], num_layers: int) -> None:
    total = sum(count for row in rows for count in row)
    if total != num_layers:
        difference = f"{abs(total - num_layers)} too {'many' if total > num_layers else 'few'}"
        raise ConfigError(
            f"{FLAG_OF_MODULE[module]} {[list(row) for row in rows]} sums to {total}; the model has {num_layers} "
            f"{module} layers ({difference}). Change a stage by that much."
        )


def _check_divisible(module: str, tensor_size: int, number: int, what: str) -> None:
    if tensor_size < 1 or number % tensor_size:
        fitting = [size for size in range(1, number + 1) if number % size == 0][:6]
        raise ConfigError(
            f"{TP_FLAG_OF_MODULE[module]} {tensor_size}: the {module} module has {number} {what}, which cannot be cut "
            f"into {tensor_size}. Sizes that fit: {', '.join(map(str, fitting))}."
        )
