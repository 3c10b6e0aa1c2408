"""Safetensors of a Hugging Face folder, written tensor by tensor: numbered shards and their index."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.weights import tensors
from mindspeed_autoparallel.weights.safetensors_file import name_of_dtype
from mindspeed_autoparallel.weights.torch_file import pieces

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 4 * 1024**3
_MOST_DESCRIPTION_BYTES = 256
"""Most bytes of one tensor's entry in a header, without its name."""


class ShardWriter:
    """Writes named tensors into numbered safetensors of at most ``max_shard_bytes`` and, at the end, their index.

    ``names``: of all tensors that may follow. The header precedes the tensors, so its space is reserved first; the
    unused rest is filled with blanks, as the format allows.
    """

    def __init__(self, folder: Path, max_shard_bytes: int, names: Collection[str]) -> None:
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.shards: list[list[str]] = []
        self.total_bytes = 0
        self._room = 256 + sum(_room_of(name) for name in names)
        self._stream: IO[bytes] | None = None
        self._header: dict[str, object] = {}
        self._begin = self._written = 0

    def add(self, name: str, blocks: Sequence[Any]) -> None:
        """Write the tensor whose rows are the concatenated rows of ``blocks``."""
        num_bytes = sum(block.nbytes for block in blocks)
        if self._stream is not None and self._written + num_bytes > self.max_shard_bytes:
            self._end_shard()
        if self._stream is None:
            self._begin_shard()
        assert self._stream is not None
        self._header[name] = {
            "dtype": name_of_dtype(blocks[0].dtype),
            "shape": list(tensors.shape_of(blocks)),
            "data_offsets": [self._written, self._written + num_bytes],
        }
        for block in blocks:
            for piece in pieces(block):
                self._stream.write(piece)
        self._written += num_bytes
        self.total_bytes += num_bytes
        self._room -= _room_of(name)

    def finish(self) -> None:
        if self._stream is not None:
            self._end_shard()
        if len(self.shards) == 1:
            (self.folder / "part-1").replace(self.folder / SINGLE)
            return
        weight_map = {}
        for index, shard in enumerate(self.shards, start=1):
            file = f"model-{index:05d}-of-{len(self.shards):05d}.safetensors"
            (self.folder / f"part-{index}").replace(self.folder / file)
            weight_map.update(dict.fromkeys(shard, file))
        index_of_shards = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        write_json_atomic(self.folder / INDEX, index_of_shards)

    def _begin_shard(self) -> None:
        self._stream = (self.folder / f"part-{len(self.shards) + 1}").open("wb")
        self._begin = 8 + self._room + -self._room % 8
        self._stream.seek(self._begin)
        self._header, self._written = {"__metadata__": {"format": "pt"}}, 0

    def _end_shard(self) -> None:
        assert self._stream is not None
        room = self._begin - 8
        header = json.dumps(self._header, separators=(",", ":")).encode().ljust(room)
        assert len(header) == room, "a name that was not announced"
        self._stream.seek(0)
        self._stream.write(room.to_bytes(8, "little") + header)
        self._stream.close()
        self._stream = None
        self.shards.append([name for name in self._header if name != "__metadata__"])


def _room_of(name: str) -> int:
    return len(json.dumps(name)) + _MOST_DESCRIPTION_BYTES
