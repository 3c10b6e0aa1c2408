"""``torch_dist``: PyTorch distributed checkpoints as Megatron writes them, read and written without any process group.

Parameters are stored whole by name, the equal layers of a stack together as one tensor ``[layer, ...]``; hosts cut
them for their layout on loading. Writing goes layer by layer, so the stack is never in memory.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import dist_names, tensors
from mindspeed_autoparallel.weights.architecture import Architecture
from mindspeed_autoparallel.weights.dist_chunks import ChunkReader
from mindspeed_autoparallel.weights.dist_metadata import METADATA, data_file, read_metadata
from mindspeed_autoparallel.weights.pickles import load_tensors_only
from mindspeed_autoparallel.weights.placement import Entry, entries_of
from mindspeed_autoparallel.weights.rank_files import iteration_of
from mindspeed_autoparallel.weights.rank_folders import iteration_folder, write_tracker
from mindspeed_autoparallel.weights.source import (
    Progress,
    TensorSource,
    checked,
    present_entries,
    refuse_unknown,
    silent,
)

_OF_MODELS = ("embedding.", "decoder.", "output_layer.", "mtp.", "text_decoder.", "image_encoder.", "audio_encoder.")
"""Prefixes of the keys of weights; other keys belong to the optimizer and to the host."""
_MOST_ROOM = 8
"""A stored tensor of more than this many times its size by config.json is refused before memory is allocated."""


def is_torch_dist(folder: Path) -> bool:
    """Return whether ``folder`` (``release`` or ``iter_*``) is a distributed checkpoint."""
    return (folder / METADATA).exists()


class TorchDistSource(TensorSource):
    """Canonical tensors from a distributed checkpoint, written by any layout."""

    def __init__(self, checkpoint: Path, architecture: Architecture) -> None:
        self.architecture = architecture
        self.folder = iteration_folder(checkpoint)
        self._reader = ChunkReader(self.folder)
        self._known = self._reader.known
        self._refuse_unknown()

    def has(self, entry: Entry) -> bool:
        return self._locate(entry) is not None

    def blocks(self, entry: Entry) -> list[Any]:
        located = self._locate(entry)
        assert located is not None
        keys, place = located
        wanted = tensors.canonical_shape(entry.rule)
        parts = []
        for key in keys:
            described = self._known[key]
            if math.prod(described.size[len(place) :]) > _MOST_ROOM * math.prod(wanted):
                # Before memory is allocated for it; small differences are reported with both shapes.
                raise ConfigError(
                    f"{self.folder}: {key} has the shape {list(described.size)}; config.json implies {list(wanted)} a "
                    "layer. The checkpoint and config.json belong to different models."
                )
            parts.append(self._reader.assemble(key, described, place))
        blocks = tensors.check_shape(entry.rule, tensors.alike(parts), self.folder)
        return [checked(entry, block, self.folder) for block in blocks]

    def _refuse_unknown(self) -> None:
        located = [self._locate(entry) for entry in present_entries(self)]
        known = {key for keys, _ in filter(None, located) for key in keys}
        known |= {
            key
            for entry in entries_of(self.architecture)
            for key, _ in dist_names.candidates(entry)
            if key in self._known
        }
        weights = (key for key in self._known if key.startswith(_OF_MODELS) and "_extra_state" not in key)
        refuse_unknown(weights, known, self.architecture, self.folder)

    def _locate(self, entry: Entry) -> tuple[list[str], tuple[int, ...]] | None:
        """Return (keys, place in their first dimensions): of layer and expert, if they are stored together."""
        sections = dist_names.sections_of(entry.rule)
        for name, place in dist_names.candidates(entry):
            if name in self._known:
                return [name], place
            if sections and name + sections[0][0] in self._known:
                return [name + end for end, _ in sections], place
        return None


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
    write_tracker(folder, iteration_of(source_folder))
    return bool(optimizer)
