"""``torch_dist``: PyTorch distributed checkpoints as Megatron writes them, read and written without any process group.

Parameters are stored whole by name, the equal layers of a stack together as one tensor ``[layer, ...]``; hosts cut
them for their layout while loading. Writing goes layer by layer, so the stack is never in memory.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT, Architecture
from mindspeed_autoparallel.weights.dist_metadata import METADATA, data_file, read_metadata
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.pickles import load_tensors_only
from mindspeed_autoparallel.weights.placement import Entry
from mindspeed_autoparallel.weights.progress import Progress, silent
from mindspeed_autoparallel.weights.rank_folders import CHECKPOINT_VERSION, TRACKER, iteration_folder
from mindspeed_autoparallel.weights.source import TensorSource, present_entries

DATA_FILE = "__0_0.distcp"
_MOST_ROOM = 8
"""A stored tensor may be so many times what config.json means and still be described in words."""
_WITH_EXTRA_STATE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def is_torch_dist(folder: Path) -> bool:
    """Return whether ``folder`` (``release`` or ``iter_*``) is a distributed checkpoint."""
    return (folder / METADATA).exists()


class TorchDistSource:
    """Canonical tensors out of a distributed checkpoint, whatever layout wrote it."""

    def __init__(self, checkpoint: Path, architecture: Architecture) -> None:
        self.architecture = architecture
        self.folder = iteration_folder(checkpoint)
        self._metadata = read_metadata(self.folder)
        self._stored = {
            (index.fqn, tuple(index.offset or ())): stored for index, stored in self._metadata.storage_data.items()
        }
        present_entries(self)

    def has(self, entry: Entry) -> bool:
        return self._locate(entry) is not None

    def load(self, entry: Entry) -> Any:
        located = self._locate(entry)
        assert located is not None
        key, layer = located
        described = self._metadata.state_dict_metadata[key]
        wanted = tensors.canonical_shape(entry.rule, self.architecture.shapes)
        num_values = math.prod(described.size[0 if layer is None else 1 :])
        if wanted is not None and num_values > _MOST_ROOM * math.prod(wanted):
            # Before memory is taken for it; small differences are told with both shapes.
            raise ConfigError(
                f"{self.folder}: {key} has the shape {list(described.size)}; config.json means {list(wanted)} a layer. "
                "The checkpoint and config.json belong to different models."
            )
        tensor = self._assemble(key, described, layer)
        return tensors.check_shape(entry.rule, tensor, self.architecture, self.folder)

    def _locate(self, entry: Entry) -> tuple[str, int | None] | None:
        """Return (key, row of the stack); None for the row where layers are stored one by one."""
        known = {key: one for key, one in self._metadata.state_dict_metadata.items() if hasattr(one, "chunks")}
        for name in _stored_names(entry.name):
            if name in known:
                return name, None
        for name in _stored_names(entry.rule.target.replace("{n}.", "")):
            if entry.rule.place == names.LAYER and name in known:
                return name, entry.layer
        return None

    def _assemble(self, key: str, described: Any, layer: int | None) -> Any:
        import torch

        skip = 0 if layer is None else 1
        size = tuple(described.size)
        self._check_described(key, described, layer)
        whole = torch.empty(size[skip:], dtype=described.properties.dtype)
        filled = 0
        for chunk in described.chunks:
            if layer is not None and not chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]:
                continue
            part = self._read_chunk(key, chunk)
            if layer is not None:
                part = part[layer - chunk.offsets[0]]
            where = tuple(
                slice(offset, offset + size)
                for offset, size in zip(chunk.offsets[skip:], chunk.sizes[skip:], strict=True)
            )
            whole[where] = part
            filled += part.numel()
        if filled != whole.numel():
            raise ConfigError(f"{self.folder}: {key} holds {filled} of {whole.numel()} values. A shard is missing.")
        return whole

    def _check_described(self, key: str, described: Any, layer: int | None) -> None:
        """Raise ``ConfigError`` where values have no type, a chunk lies outside its tensor, two lie at one place, or
        the stack has no such row."""
        import torch

        size = tuple(described.size)
        if not isinstance(described.properties.dtype, torch.dtype):
            kind = type(described.properties.dtype).__name__
            raise ConfigError(f"{self.folder}: {key} should name the type of its values, and names a {kind}.")
        if layer is not None and not (size and layer < size[0]):
            raise ConfigError(f"{self.folder}: {key} has the shape {list(size)}, in which there is no layer {layer}.")
        places = [tuple(chunk.offsets) for chunk in described.chunks]
        inside = all(
            len(chunk.offsets) == len(chunk.sizes) == len(size)
            and all(
                begin >= 0 and length >= 0 and begin + length <= whole
                for begin, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
            )
            for chunk in described.chunks
        )
        if not inside or len(set(places)) < len(places):
            raise ConfigError(f"{self.folder}: the parts of {key} do not lie inside its shape {list(size)}.")

    def _read_chunk(self, key: str, chunk: Any) -> Any:
        import torch

        stored = self._stored.get((key, tuple(chunk.offsets)))
        if stored is None:
            raise ConfigError(f"{self.folder}: {key} has no data at {tuple(chunk.offsets)}. A shard is missing.")
        part = _read_item(self.folder, stored)
        if not isinstance(part, torch.Tensor) or part.numel() != math.prod(chunk.sizes):
            raise ConfigError(f"{self.folder}: the data of {key} at {tuple(chunk.offsets)} do not fill its shape.")
        return part.reshape(tuple(chunk.sizes))


def _write_common(target: Path, num_layers: int, iteration: int | None) -> None:
    import torch

    # Hosts look up the sizes that wrote a checkpoint; a converted one has none, so it says one of each.
    arguments = argparse.Namespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers=num_layers,
        ckpt_format="torch_dist",
    )
    common = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration or 0, "args": arguments}
    torch.save(common, target / "common.pt")
    described_as = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (target / "metadata.json").write_text(json.dumps(described_as), encoding="utf-8")


def write_torch_dist(
    source: TensorSource,
    folder: Path,
    layout: CheckpointLayout,
    *,
    iteration: int | None = None,
    progress: Progress = silent,
) -> None:
    """Write ``source`` into the empty ``folder``; holds one tensor in memory. The tracker file is written last."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp

    architecture = source.architecture
    target = folder / ("release" if iteration is None else f"iter_{iteration:07d}")
    target.mkdir()
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    entries = [
        entry
        for entry in present_entries(source)
        if not (names.is_output_layer(entry.rule) and architecture.tied_embeddings)
    ]
    with (target / DATA_FILE).open("wb") as stream:
        for done, entry in enumerate(entries):
            padded = layout.padded_vocab(architecture.vocab_size)
            tensor = tensors.cut(entry.rule, source.load(entry), 1, padded)[0]
            key, offsets, size = _stored_names(entry.name)[-1], [0] * tensor.dim(), tuple(tensor.shape)
            if entry.rule.place == names.LAYER:
                key = _stored_names(entry.rule.target.replace("{n}.", ""))[-1]
                offsets = [entry.layer, *offsets]
                tensor = tensor.unsqueeze(0)
                size = (architecture.modules[entry.rule.module].num_layers, *size)
            if key not in described:
                properties = dcp.TensorProperties(dtype=tensor.dtype)
                described[key] = dcp.TensorStorageMetadata(properties, torch.Size(size), [])
            described[key].chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
            stored[dcp.MetadataIndex(key, torch.Size(offsets))] = _append(stream, tensor)
            state = _extra_state(entry, key, architecture)
            if state is not None:
                described[state] = dcp.BytesStorageMetadata()
                stored[dcp.MetadataIndex(state)] = _append(stream, [None])
            progress(done + 1, len(entries), entry.name)
    with (target / METADATA).open("wb") as stream:
        pickle.dump(dcp.Metadata(state_dict_metadata=described, planner_data={}, storage_data=stored), stream)
    _write_common(target, architecture.modules[TEXT].num_layers, iteration)
    (folder / TRACKER).write_text("release" if iteration is None else str(iteration), encoding="utf-8")


def copy_torch_dist(source_folder: Path, folder: Path, progress: Progress = silent) -> bool:
    """Copy a distributed checkpoint with everything in it; returns whether that includes optimizer state.

    Such a checkpoint has no layout, so a copy is its resplit. ``ConfigError`` if the optimizer was saved in the cut
    of its data-parallel ranks, which cannot be loaded under another layout, or if a data file is missing.
    """
    metadata = read_metadata(source_folder)
    keys = list(metadata.state_dict_metadata)
    optimizer = [key for key in keys if key.startswith(("optimizer.", "chained_"))]
    bound = [key for key in optimizer if "gbuf_idx" in key or ".bucket_" in key or "optimizer.distributed" in key]
    if bound:
        raise ConfigError(
            f"{source_folder}: the optimizer state ({bound[0]}, ...) is stored by data-parallel rank and fits only the "
            "layout that wrote it. Save once more with --dist-ckpt-optim-fully-reshardable, or --no-save-optim."
        )
    for stored in metadata.storage_data.values():
        path = data_file(source_folder, stored)
        if not path.exists() or path.stat().st_size < stored.offset + stored.length:
            raise ConfigError(f"{path} is missing or cut off. Copy the whole checkpoint.")
    if (source_folder / "common.pt").exists():  # newer Megatron keeps it among the data
        load_tensors_only(source_folder / "common.pt", mapped=False)
    target = folder / source_folder.name
    target.mkdir()
    files = sorted(path for path in source_folder.iterdir() if path.is_file())
    for path in files:
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link, to {path.resolve()}. Put the file itself there.")
    for done, path in enumerate(files):
        shutil.copyfile(path, target / path.name)
        progress(done + 1, len(files), path.name)
    number = source_folder.name.removeprefix("iter_")
    (folder / TRACKER).write_text(str(int(number)) if number.isdigit() else "release", encoding="utf-8")
    return bool(optimizer)


def _read_item(folder: Path, stored: Any) -> Any:
    import torch

    path = data_file(folder, stored)
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size < stored.offset + stored.length:
                raise EOFError("the file is shorter")
            stream.seek(stored.offset)
            return torch.load(io.BytesIO(stream.read(stored.length)), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different class for each kind of damage
        reason = shown(str(error), 200)
        raise ConfigError(f"{path}: cannot read {stored.length} bytes at {stored.offset}: {reason}.") from error


def _append(stream: Any, value: Any) -> Any:
    """Write ``value`` and tells where it lies."""
    import torch

    begin = stream.tell()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    stream.write(buffer.getbuffer())
    return _storage_info(begin, stream.tell() - begin)


def _extra_state(entry: Entry, key: str, architecture: Architecture) -> str | None:
    """Return key of the empty extra state that Megatron's parallel linear layers ask for beside their weight."""
    linear = key.removesuffix(".weight")
    if linear == key or linear.rsplit(".", 1)[-1] not in _WITH_EXTRA_STATE:
        return None
    place = (0, 1)
    if entry.rule.place == names.LAYER:
        place = (entry.layer, architecture.modules[entry.rule.module].num_layers)
    return f"{linear}._extra_state/shard_{place[0]}_{place[1]}"


def _storage_info(offset: int, length: int) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(DATA_FILE, offset, length)


def _stored_names(name: str) -> list[str]:
    """Return ``name``, then the name Megatron stores it under: norms belong to the linear layer behind them, fused or
    not."""
    for plain, fused in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ):
        if plain in name:
            return [name, name.replace(plain, fused)]
    return [name]
