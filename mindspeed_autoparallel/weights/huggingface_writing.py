"""Hugging Face folders, and checkpoints of FSDP2 trainings under the same names, written tensor by tensor."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import memory, names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT, Architecture
from mindspeed_autoparallel.weights.dcp import DcpWriter
from mindspeed_autoparallel.weights.huggingface import is_stack, shard_of_tensor, stored_name
from mindspeed_autoparallel.weights.placement import Entry, entries_of
from mindspeed_autoparallel.weights.safetensors_file import SafetensorsFile
from mindspeed_autoparallel.weights.shard_writer import DEFAULT_SHARD_BYTES, INDEX, ShardWriter
from mindspeed_autoparallel.weights.source import Progress, TensorSource, silent, stored_entries

if TYPE_CHECKING:
    import torch


def write_huggingface(
    source: TensorSource,
    folder: Path,
    original: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    as_dcp: bool = False,
    progress: Progress = silent,
) -> None:
    """Write ``source`` into the empty ``folder`` as a Hugging Face model like ``original``.

    ``original`` provides config and tokenizer files, the naming form, and the parts that are never converted (Omni's
    talker). ``as_dcp``: the same tensors as a checkpoint of torch.distributed, as FSDP2 trainings load it. Holds one
    tensor in memory, and its parts.
    """
    architecture = source.architecture
    entries = stored_entries(source)
    refuse_differing_tie(source)
    stored = _stored_in(original)
    rename = _naming_of(stored, architecture)
    unconverted = _unconverted(stored, source, rename)
    copies = {original_name: copy for copy, original_name in architecture.copies}
    written = {stored_name(classic) for entry in entries for classic in entry.sources} | set(copies.values())
    announced = [rename(name) for name in written] + list(unconverted)
    writer = DcpWriter(folder) if as_dcp else ShardWriter(folder, max_shard_bytes, announced)
    stacks: dict[str, torch.Tensor] = {}
    for done, entry in enumerate(entries):
        dtype = _dtype_in(stored, rename(entry.sources[0])) if entry.rule.combine == names.MINUS_ONE else None
        separated = tensors.separate(entry.rule, source.blocks(entry), dtype)
        for classic, blocks in zip(entry.sources, separated, strict=True):
            if is_stack(classic):
                blocks = _stacked(stacks, entry, classic, blocks, architecture.modules[TEXT].num_experts)
                if not blocks:
                    continue
            name = stored_name(classic)
            writer.add(rename(name), blocks)
            if name in copies:
                writer.add(rename(copies[name]), blocks)
        progress(done + 1, len(entries), entry.name)
    for name, file in unconverted.items():
        writer.add(name, [file.read(name)])
    writer.finish()
    if as_dcp:
        return
    for path in sorted(original.iterdir()):
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth") and path.name != INDEX:
            shutil.copyfile(_inside(path, original), folder / path.name)


def _stacked(
    stacks: dict[str, torch.Tensor], entry: Entry, source: str, blocks: list[Any], num_experts: int
) -> list[Any]:
    """Copy one expert's ``blocks`` into the tensor of all; return that tensor after the last one, else nothing."""
    if entry.expert == 0:
        stacks[source] = memory.empty((num_experts, *tensors.shape_of(blocks)), blocks[0].dtype)
    stacks[source][entry.expert].copy_(tensors.whole(blocks))
    return [stacks.pop(source)] if entry.expert == num_experts - 1 else []


def _inside(path: Path, folder: Path) -> Path:
    """Return ``path``, unless it is a symbolic link that leaves ``folder``; a hub's cache keeps its files in
    ``blobs``."""
    real = path.resolve()
    homes = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise ConfigError(f"{path} is a symbolic link out of its folder, to {real}. Put the file itself there.")
    return path


def refuse_differing_tie(source: TensorSource) -> None:
    """Raise ``ConfigError`` if ``source`` has a separately trained output layer that config.json would drop."""
    if not source.architecture.tied_embeddings:
        return
    entries = {entry.name: entry for entry in entries_of(source.architecture) if entry.rule.split == names.VOCABULARY}
    stored = [source.load(entry) for entry in entries.values() if source.has(entry)]
    if len(stored) == 2 and not tensors.same_bits(*stored):
        raise ConfigError(
            "config.json sets tie_word_embeddings, but the output layer of the checkpoint differs from its "
            'embedding: it was trained untied. Set "tie_word_embeddings": false in config.json of --hf-dir.'
        )


def _naming_of(known: Collection[str], architecture: Architecture) -> Callable[[str], str]:
    """Return the function from classic names to the form of the names ``known``; the classic form without any."""
    if architecture.family == "qwen2_5_omni":
        plain = known and not any(name.startswith("thinker.") for name in known)
        return (lambda classic: classic) if plain else (lambda classic: f"thinker.{classic}")
    return names.naming_form(known)


def _dtype_in(stored: Mapping[str, SafetensorsFile], name: str) -> Any:
    """Return the type of ``name`` in the original; None if it has no such tensor."""
    with contextlib.suppress(ConfigError, KeyError):
        return stored[name].dtype(name)
    return None


def _stored_in(original: Path) -> dict[str, SafetensorsFile]:
    """Return the file of every tensor in the original; empty if it has no weights, or broken ones."""
    with contextlib.suppress(ConfigError):
        return shard_of_tensor(original)
    return {}


def _unconverted(
    stored: Mapping[str, SafetensorsFile], source: TensorSource, rename: Callable[[str], str]
) -> dict[str, SafetensorsFile]:
    """Return name -> file of the tensors from the original: parts that are never converted, and those that training
    lacks."""
    untrained = {
        rename(classic)
        for entry in entries_of(source.architecture)
        if entry.rule.untrained and not source.has(entry)
        for classic in entry.sources
    }
    left_out = source.architecture.left_out
    return {
        name: file
        for name, file in stored.items()
        if name in untrained or (left_out and names.classic_name(name).startswith(left_out))
    }
