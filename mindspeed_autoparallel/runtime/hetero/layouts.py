"""The modules of a hetero-parallel job, read from model.json and checked before anything is built (pure Python).

A top-level block that carries ``tp``, ``pp`` or ``cp``, itself or in a block inside it, is a module and trains under
these sizes as a whole (an image encoder with its projector). Its name is also the model's attribute by default;
``"hetero": {"attr", "role", "adapter"}`` in the block overrides the defaults. Exactly one module is the backbone; a
block whose name ends in ``_generator`` is a generator after it, the others are encoders before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, shown
from mindspeed_autoparallel.runtime.hetero.blocks import check_block

_MOST_RANKS = 2**20
SIZES = ("tp", "pp", "cp")
BACKBONE = "text_decoder"
ROLES = ("backbone", "encoder", "generator")


@dataclass(frozen=True)
class ModuleLayout:
    """One module's sizes; ``mbs`` (samples per encoder batch) is None if the file does not set it."""

    name: str
    attribute: str
    tensor_size: int
    pipeline_size: int
    context_size: int
    micro_batch_size: int | None = None
    role: str = "encoder"
    adapter: str | None = None
    sequence_parallel: bool = False
    """Sequence parallelism of an encoder; for the backbone the host's flag applies."""

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // (self.tensor_size * self.pipeline_size * self.context_size)


@dataclass(frozen=True)
class HeteroLayout:
    """The backbone, the encoders before it and the generators after it, each in file order."""

    backbone: ModuleLayout
    encoders: tuple[ModuleLayout, ...]
    generators: tuple[ModuleLayout, ...] = ()

    @property
    def others(self) -> tuple[ModuleLayout, ...]:
        """Return the modules other than the backbone."""
        return (*self.encoders, *self.generators)


def read_model(arguments: argparse.Namespace) -> tuple[Path, Mapping[str, object]]:
    """Return the model.json that the host's ``arguments`` name, and its content; ``ConfigError`` without one."""
    file_name = getattr(arguments, "hetero_model", None) or getattr(arguments, "mm_model", None)
    if not file_name:
        raise ConfigError(
            "--hetero-parallel reads every module's tp/pp/cp from model.json; give it with --mm-model, "
            "or with --hetero-model where the script has no such flag."
        )
    path = Path(file_name)
    flag = "--hetero-model" if getattr(arguments, "hetero_model", None) else "--mm-model"
    model = read_json(path, f"model description ({flag})")
    if not isinstance(model, Mapping):
        raise ConfigError(f"{path} must hold a JSON object with a block per module, got {type(model).__name__}.")
    return path, model


def read_layout(model: Mapping[str, object], *, world_size: int, source: str = "model.json") -> HeteroLayout:
    """Return the modules of ``model`` for ``world_size`` ranks; ``ConfigError`` names the block and the numbers."""
    modules = []
    for name, block in model.items():
        found = list(_blocks(block, (name,))) if isinstance(block, Mapping) else []
        read = [_module(path, inner, world_size, source) for path, inner in found]
        if len({(m.tensor_size, m.pipeline_size, m.context_size) for m in read}) > 1:
            where = ", ".join(".".join(path) for path, _ in found)
            raise ConfigError(f"{source}: {name} trains under one layout, but {where} carry different tp/pp/cp.")
        modules += read[:1]
    backbones = [m for m in modules if m.role == "backbone"]
    if len(backbones) != 1:
        names = ", ".join(m.name for m in backbones) or "none"
        raise ConfigError(
            f"{source}: hetero parallel needs exactly one backbone, found {names}. Give tp/pp/cp to {BACKBONE!r}, "
            'or mark one block with "hetero": {"role": "backbone"}.'
        )
    encoders = tuple(m for m in modules if m.role == "encoder")
    generators = tuple(m for m in modules if m.role == "generator")
    if not encoders and not generators:
        raise ConfigError(f"{source}: no block besides {backbones[0].name!r} carries tp/pp/cp; add them to encoders.")
    _check_generators(generators, backbones[0], model, source)
    return HeteroLayout(backbones[0], encoders, generators)


def _check_generators(
    generators: Sequence[ModuleLayout], backbone: ModuleLayout, model: Mapping[str, object], source: str
) -> None:
    """Raise ``ConfigError``, with the remedy, for settings that generators do not support."""
    if len(generators) > 1:
        raise ConfigError(
            f"{source}: {', '.join(m.name for m in generators)} follow {backbone.name}, but only one can train "
            "under a layout of its own. Take tp/pp/cp out of the other blocks: they train on the last stage."
        )
    for module in generators:
        for key, size in (("cp", module.context_size), ("sp", module.sequence_parallel)):
            if size > 1 or size is True:
                raise ConfigError(
                    f"{source}: {module.name}.{key} is {str(size).lower()}, but a generator keeps whole "
                    "items on each of its ranks. Use tp and pp (dp follows)."
                )
        if module.micro_batch_size is not None:
            raise ConfigError(
                f"{source}: {module.name}.mbs is {module.micro_batch_size}, but a generator takes the backbone's "
                "microbatches one by one. Leave it out."
            )
    block = model.get(backbone.name)
    counts = block.get("pipeline_num_layers") if isinstance(block, Mapping) else None
    if generators and isinstance(counts, list) and len(counts) > 1 and isinstance(counts[0], list):
        raise ConfigError(
            f"{source}: {generators[0].name} follows the 1F1B schedule, but {backbone.name}.pipeline_num_layers gives "
            f"the backbone {len(counts)} virtual stages. Give it one list of layer counts."
        )


def _blocks(
    node: Mapping[str, object], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    if path and any(size in node for size in SIZES):
        yield path, node
        return
    for key, child in node.items():
        if isinstance(child, Mapping):
            yield from _blocks(child, (*path, key))


def _module(path: tuple[str, ...], block: Mapping[str, object], world_size: int, source: str) -> ModuleLayout:
    where = ".".join(path)
    sizes: dict[str, int] = {}
    for key in (*SIZES, "mbs"):
        value = block.get(key, None if key == "mbs" else 1)
        if key == "mbs" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_RANKS:
            said = shown(repr(value) if isinstance(value, str) else value)
            raise ConfigError(f"{source}: {where}.{key} is {said}; it must be a whole number from 1 up.")
        sizes[key] = value
    extra = block.get("hetero", {})
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{source}: {where}.hetero is {shown(extra)}; it must be an object of attr, role, adapter.")
    unknown = set(extra) - {"attr", "role", "adapter"}
    if unknown:
        raise ConfigError(f"{source}: {where}.hetero has unknown keys {sorted(unknown)}; it takes attr, role, adapter.")
    for key in ("attr", "adapter"):
        if not isinstance(extra.get(key, ""), str):
            raise ConfigError(f"{source}: {where}.hetero.{key} is {shown(extra[key])}; it must be a text.")
    attribute = extra.get("attr", path[0])
    if "attr" in extra and not all(part.isidentifier() for part in attribute.split(".")):
        raise ConfigError(
            f"{source}: {where}.hetero.attr is {shown(attribute)}; it must be names of attributes with dots between."
        )
    own_role = "generator" if path[0].endswith("_generator") else "encoder"
    role = extra.get("role", "backbone" if path[0] == BACKBONE else own_role)
    if role not in ROLES:
        raise ConfigError(f"{source}: {where}.hetero.role is {role!r}; it must be one of {', '.join(ROLES)}.")
    check_block(where, block, sizes, role, world_size, source)
    return ModuleLayout(
        path[0],
        attribute,
        sizes["tp"],
        sizes["pp"],
        sizes["cp"],
        sizes.get("mbs"),
        role,
        extra.get("adapter"),
        _sequence_parallel(where, block, role, sizes["tp"], source),
    )


def check_attribute(module: ModuleLayout, known: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the attribute of ``module`` is not among the model's ``known`` ones for encoders."""
    if module.attribute not in known:
        raise ConfigError(
            f"{module.name}: the model has no attribute {shown(module.attribute)!r} for an encoder (it has "
            f'{", ".join(known)}). Name the right one in model.json: "hetero": {{"attr": "..."}}.'
        )


def _sequence_parallel(where: str, block: Mapping[str, object], role: str, tensor: int, source: str) -> bool:
    """Return an encoder's ``sp``; ``ConfigError`` if it is not a boolean, or if tp is 1."""
    value = block.get("sp", False)
    if not isinstance(value, bool):
        raise ConfigError(f"{source}: {where}.sp is {shown(value)}; it must be true or false.")
    if value and role == "backbone":
        raise ConfigError(f"{source}: {where}.sp: the backbone's sequence parallelism is --sequence-parallel.")
    if value and tensor == 1:
        raise ConfigError(f"{source}: {where}.sp splits rows over tensor ranks, but tp is 1. Raise tp or leave sp out.")
    return value


def encoder_scale(module: ModuleLayout, micro_batch_size: int, default: int) -> int:
    """Return how many microbatches ``module`` encodes together: from its own mbs, otherwise ``default``, the flag's."""
    own = module.micro_batch_size
    if own is None:
        return default
    if own % micro_batch_size:
        raise ConfigError(
            f"{module.name}.mbs is {own}, which is not a multiple of the backbone's micro batch {micro_batch_size}. "
            "An encoder takes whole microbatches of the backbone."
        )
    return own // micro_batch_size


def check_script_sizes(tensor: int, pipeline: int, context: int) -> None:
    """Raise ``ConfigError`` for TP, PP or CP other than 1 in the launch script: model.json has the sizes."""
    if (tensor, pipeline, context) != (1, 1, 1):
        raise ConfigError(
            f"--hetero-parallel takes tp/pp/cp from model.json, but the script sets TP {tensor}, PP {pipeline}, "
            f"CP {context}. Set all three to 1."
        )


def check_batch(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Return the microbatches per step; ``ConfigError`` if the global batch is no multiple (it is never changed)."""
    per_step = micro_batch_size * data_parallel_size
    if global_batch_size % per_step:
        raise ConfigError(
            f"global batch {global_batch_size} is not a multiple of micro batch {micro_batch_size} x backbone data "
            f"parallel {data_parallel_size} = {per_step}. Change --global-batch-size or --micro-batch-size."
        )
    return global_batch_size // per_step


def check_scale(scale: int, num_microbatches: int, said_by: str = "--hetero-encoder-mbs-scale") -> None:
    """Raise ``ConfigError`` for an encoder batch scale outside 1 to ``num_microbatches``, those of a step.

    ``said_by``: the origin of the value, the flag or a module's mbs.
    """
    if not 1 <= scale <= num_microbatches:
        raise ConfigError(f"{said_by} {scale} must lie between 1 and the {num_microbatches} microbatches of a step.")
