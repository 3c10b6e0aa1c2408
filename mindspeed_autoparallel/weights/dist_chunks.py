"""The tensors of a distributed checkpoint, assembled from the chunks that its writers stored."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import IO, Any, cast

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.weights.dist_metadata import data_file, read_metadata


class ChunkReader:
    """``known``: key -> description of every tensor in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = read_metadata(folder)
        self.known = {key: one for key, one in metadata.state_dict_metadata.items() if hasattr(one, "chunks")}
        self._stored = {(index.fqn, tuple(index.offset or ())): one for index, one in metadata.storage_data.items()}
        self._chunks_at: dict[tuple[str, int], dict[tuple[int, ...], list[Any]] | None] = {}

    def _chunks_of(self, key: str, described: Any, place: tuple[int, ...]) -> list[Any]:
        """Return the chunks of ``described`` that hold something at ``place``."""
        skip = len(place)
        if not skip:
            return list(described.chunks)
        if (key, skip) not in self._chunks_at:
            single = all(size == 1 for chunk in described.chunks for size in chunk.sizes[:skip])
            found: dict[tuple[int, ...], list[Any]] = {}
            for chunk in described.chunks if single else ():
                found.setdefault(tuple(chunk.offsets[:skip]), []).append(chunk)
            self._chunks_at[key, skip] = found if single else None
        table = self._chunks_at[key, skip]
        if table is not None:
            return table.get(place, [])
        return [
            chunk
            for chunk in described.chunks
            if all(
                begin <= at < begin + size for at, begin, size in zip(place, chunk.offsets, chunk.sizes, strict=False)
            )
        ]

    def assemble(self, key: str, described: Any, place: tuple[int, ...]) -> Any:
        import torch

        skip = len(place)
        size = tuple(described.size)
        self._check_described(key, described, place)
        whole = None
        filled = 0
        for chunk in self._chunks_of(key, described, place):
            part = self._read_chunk(key, chunk)
            for at, begin in zip(place, chunk.offsets, strict=False):
                part = part[at - begin]
            if tuple(chunk.sizes[skip:]) == size[skip:]:
                return part.to(described.properties.dtype)
            if whole is None:
                whole = torch.empty(size[skip:], dtype=described.properties.dtype)
            where = tuple(
                slice(offset, offset + length)
                for offset, length in zip(chunk.offsets[skip:], chunk.sizes[skip:], strict=True)
            )
            whole[where] = part
            filled += part.numel()
        num_values = math.prod(size[skip:])
        if whole is None or filled != num_values:
            raise ConfigError(f"{self.folder}: {key} holds {filled} of {num_values} values. A shard is missing.")
        return whole

    def _check_described(self, key: str, described: Any, place: tuple[int, ...]) -> None:
        """Raise ``ConfigError`` if values have no type, a chunk is outside its tensor, two chunks overlap, or
        the stack has no such row."""
        import torch

        size = tuple(described.size)
        if not isinstance(described.properties.dtype, torch.dtype):
            kind = type(described.properties.dtype).__name__
            raise ConfigError(f"{self.folder}: {key} should name the type of its values, and names a {kind}.")
        if len(size) < len(place) or any(at >= length for at, length in zip(place, size, strict=False)):
            raise ConfigError(f"{self.folder}: {key} has the shape {list(size)}, in which there is no layer {place}.")
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


class _Part(io.RawIOBase):
    """A range of a file as a separate file, so that torch reads a tensor straight into its memory."""

    def __init__(self, stream: IO[bytes], begin: int, length: int) -> None:
        self._stream, self._begin, self._length, self._at = stream, begin, length, 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._stream.seek(self._begin + self._at)
        count = self._stream.readinto(view)  # type: ignore[attr-defined]  # of binary files
        self._at += count
        return int(count)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _read_item(folder: Path, stored: Any) -> Any:
    import torch

    path = data_file(folder, stored)
    try:
        with path.open("rb", buffering=0) as stream:
            if os.fstat(stream.fileno()).st_size < stored.offset + stored.length:
                raise EOFError("the file is shorter")
            part = cast(IO[bytes], _Part(stream, stored.offset, stored.length))
            return torch.load(part, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different class for each kind of damage
        reason = shown(str(error), 200)
        raise ConfigError(f"{path}: cannot read {stored.length} bytes at {stored.offset}: {reason}.") from error
