"""Checkpoints of torch.distributed under Hugging Face names: the format that FSDP2 trainings load and save, and that
``mm-convert`` writes.

Tensors have the names of the Hugging Face model with the prefix ``model.``; those of all experts may have two
dimensions, [expert x in, out].
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import tensors
from mindspeed_autoparallel.weights.dist_chunks import ChunkReader
from mindspeed_autoparallel.weights.dist_metadata import METADATA, read_metadata
from mindspeed_autoparallel.weights.dist_writing import DATA_FILE, append
from mindspeed_autoparallel.weights.rank_files import CHECKPOINT_VERSION
from mindspeed_autoparallel.weights.rank_folders import iteration_folder, write_tracker

_PREFIX = "model."
_EXPERTS = re.compile(r"experts\.(gate_up_proj|down_proj)$")


def is_dcp(checkpoint: Path) -> bool:
    """Return whether ``checkpoint`` holds tensors under Hugging Face names."""
    folder = iteration_folder(checkpoint)
    if not (folder / METADATA).exists():
        return False
    keys = read_metadata(folder).state_dict_metadata
    return any(key.startswith(_PREFIX) and key.endswith(("embed_tokens.weight", "lm_head.weight")) for key in keys)


class DcpFile:
    """Reads a checkpoint like a safetensors file: by Hugging Face names."""

    num_experts = 0

    def __init__(self, checkpoint: Path) -> None:
        self.path = iteration_folder(checkpoint)
        self._reader = ChunkReader(self.path)
        known = [key for key in self._reader.known if key.startswith(_PREFIX)]
        # MindSpeed-MM's trainer of Qwen3-VL on Megatron wraps the Hugging Face model once more.
        wrapped = any(key.startswith((3 * _PREFIX, f"{2 * _PREFIX}lm_head.")) for key in known)
        self._key_of = {key.removeprefix(2 * _PREFIX if wrapped else _PREFIX): key for key in known}
        if not self._key_of:
            raise ConfigError(
                f"{self.path} has no tensors under {_PREFIX!r}: it is not a checkpoint of an FSDP2 training."
            )

    def keys(self) -> list[str]:
        """Return the Hugging Face names of the tensors."""
        return list(self._key_of)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape as stored."""
        return {name: tuple(self._reader.known[key].size) for name, key in self._key_of.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name``, with a dimension of the experts."""
        stored = tuple(self._reader.known[self._key_of[name]].size)
        if self.num_experts and _EXPERTS.search(name) and len(stored) == 2 and stored[0] % self.num_experts == 0:
            return (self.num_experts, stored[0] // self.num_experts, stored[1])
        return stored

    def dtype(self, name: str) -> Any:
        """Return torch's type of the tensor ``name``."""
        return self._reader.known[self._key_of[name]].properties.dtype

    def read(self, name: str) -> Any:
        """Return the tensor ``name``."""
        key = self._key_of[name]
        return self._reader.assemble(key, self._reader.known[key], ()).reshape(self.shape(name))


class DcpWriter:
    """Writes named tensors as such a checkpoint, below ``release``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "release").mkdir()
        self._stream: IO[bytes] = (folder / "release" / DATA_FILE).open("wb")
        self._described: dict[str, object] = {}
        self._stored: dict[Any, Any] = {}

    def add(self, name: str, blocks: Sequence[Any]) -> None:
        """Write the tensor of ``blocks``, consecutive rows, under the Hugging Face name ``name``."""
        import torch
        from torch.distributed.checkpoint import metadata as dcp

        size = torch.Size(tensors.shape_of(blocks))
        offsets = torch.Size([0] * len(size))
        properties = dcp.TensorProperties(dtype=blocks[0].dtype)
        chunks = [dcp.ChunkStorageMetadata(offsets, size)]
        self._described[_PREFIX + name] = dcp.TensorStorageMetadata(properties, size, chunks)
        self._stored[dcp.MetadataIndex(_PREFIX + name, offsets)] = append(self._stream, blocks, size)

    def finish(self) -> None:
        """Write the description, and the tracker file last."""
        from torch.distributed.checkpoint import metadata as dcp

        version = "checkpoint_version"
        self._described[version] = dcp.BytesStorageMetadata()
        self._stored[dcp.MetadataIndex(version)] = append(self._stream, CHECKPOINT_VERSION)
        self._stream.close()
        # Path of a tensor in the nested state that FSDP2 trainings save; mm-convert reassembles the state from it.
        nested = {key: ("model", key.removeprefix(_PREFIX)) for key in self._described} | {version: (version,)}
        described = dcp.Metadata(state_dict_metadata=self._described, planner_data=nested, storage_data=self._stored)
        with (self.folder / "release" / METADATA).open("wb") as stream:
            pickle.dump(described, stream)
        write_tracker(self.folder, None)
