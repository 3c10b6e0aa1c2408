"""Files of ``torch.save``, written tensor by tensor: each goes to the disk at once, the pickle that names them last.

``torch.save`` needs all tensors at once, and reports a full disk with a different error class.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

_ALIGNED_BYTES = 64
_ZIP64_BYTES = 1 << 30
_PIECE_BYTES = 1 << 18
_NO_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class _Storage:
    key: str
    kind: Any
    num_values: int


@dataclass(frozen=True)
class StoredTensor:
    """Placeholder of a tensor that is already in the file."""

    storage: _Storage
    shape: tuple[int, ...]


class TorchFile:
    """Writes a file for ``torch.load`` into ``stream``, from its position on. ``OSError`` if the disk is full."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._zip = _Zip(cast(Any, _From(stream)), "w")
        self._count = 0

    def add(self, blocks: Sequence[Any], shape: Sequence[int]) -> StoredTensor:
        """Write ``blocks``, tensors with consecutive values, as one of ``shape``; return its placeholder for the
        content."""
        with self.growing(blocks[0].dtype, shape) as (stored, write):
            for block in blocks:
                write(block)
        return stored

    @contextmanager
    def growing(self, dtype: Any, shape: Sequence[int]) -> Iterator[tuple[StoredTensor, Callable[[Any], None]]]:
        """Yield the placeholder of a tensor of ``shape``, and a function that writes its next values, a tensor of
        ``dtype``."""
        import torch

        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
        storage = _Storage(str(self._count), kind, math.prod(shape))
        self._count += 1
        with self._record(f"archive/data/{storage.key}", storage.num_values * dtype.itemsize) as write:

            def write_block(block: Any) -> None:
                for piece in pieces(block):
                    write(piece)

            yield StoredTensor(storage, tuple(shape)), write_block

    def finish(self, content: Any) -> None:
        """Write ``content``, plain values and placeholders from ``add``, and finish the file."""
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=2).dump(content)
        for name, data in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            with self._record(f"archive/{name}", len(data)) as write:
                write(data)
        self._zip.close()

    @contextmanager
    def _record(self, name: str, num_bytes: int) -> Iterator[Callable[[Any], object]]:
        info = zipfile.ZipInfo(name, date_time=_NO_TIME)
        large = num_bytes >= _ZIP64_BYTES
        assert self._zip.fp is not None
        begin = self._zip.fp.tell() + 30 + len(name) + 4 + (20 if large else 0)
        padding = -begin % _ALIGNED_BYTES
        info.extra = b"FB" + struct.pack("<H", padding) + b"F" * padding
        with self._zip.open(info, "w", force_zip64=large) as record:
            yield record.write
        assert info.file_size == num_bytes, f"{name}: {info.file_size} bytes, not {num_bytes}"


class _Zip(zipfile.ZipFile):
    def __del__(self) -> None:
        """Leave a file that was not finished without a directory: its owner may have closed the stream."""


class _From:
    """A stream that begins at the position of ``stream``."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._begin = stream, stream.tell()

    def tell(self) -> int:
        return self._stream.tell() - self._begin

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset + (0 if whence else self._begin), whence) - self._begin

    def write(self, data: Any) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def seekable(self) -> bool:
        return True


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", value.kind, value.key, "cpu", value.num_values)
        return None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return NotImplemented
        import torch

        strides = torch.empty(value.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (value.storage, 0, value.shape, strides, False, OrderedDict())


def pieces(tensor: Any) -> Iterator[Any]:
    """Yield the values of ``tensor`` in small parts, each to be written before the next is made.

    A part stays in the processor's cache, so its checksum needs no second read. Rows that are not contiguous are copied
    into one small buffer, which is cheaper than memory for a second tensor.
    """
    import torch

    tensor = tensor.detach()
    parts: Iterable[Any]
    if not tensor.is_contiguous() and tensor.nbytes > _PIECE_BYTES:
        num_rows = max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes)
        buffer = torch.empty(num_rows, *tensor.shape[1:], dtype=tensor.dtype)
        parts = (buffer[: len(part)].copy_(part) for part in tensor.split(num_rows))
    else:
        parts = (tensor.contiguous(),)
    for part in parts:
        data = memoryview(part.reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, len(data), _PIECE_BYTES):
            yield data[begin : begin + _PIECE_BYTES]
