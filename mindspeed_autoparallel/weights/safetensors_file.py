"""One safetensors file, with a separate memory map for each tensor.

The reader of the safetensors package maps the whole file: every touched page counts as memory of the process until
the file is closed, and a conversion would hold its input together with its output. A separate map is freed with its
tensor, and needs no memory that must be zeroed first. Format: 8 bytes length, JSON header, tensors.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from pathlib import Path
from typing import Any, TypedDict

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import check_readable, loads_json

_HEADER_LIMIT_BYTES = 100_000_000  # the format's own
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""The format's names -> (torch's name, bytes of one value)."""


def name_of_dtype(dtype: Any) -> str:
    """Return the format's name of torch's ``dtype``."""
    named = str(dtype).removeprefix("torch.")
    return next(name for name, (known, _) in _DTYPES.items() if known == named)


class _Described(TypedDict):
    """A tensor's entry in the header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class SafetensorsFile:
    """Opened at ``path``; ``ConfigError`` if it is missing, cut off or not safetensors at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            check_readable(path, "shard")
        try:
            with path.open("rb") as stream:
                self._header, self._data_begin = self._read_header(stream)
        except FileNotFoundError as error:
            raise ConfigError(f"shard {path} is missing. Download it again.") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"shard {path} is corrupt: {str(error)[:200]}. Download it again.") from error

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name``, without reading it."""
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> Any:
        """Return torch's type of the tensor ``name``; ``ConfigError`` if torch has none."""
        import torch

        stored = self._header[name]["dtype"]
        known, _ = _DTYPES.get(stored, ("", 0))
        if not hasattr(torch, known):
            raise ConfigError(f"{self.path}: {name} is {stored[:20]}, which cannot be converted.")
        return getattr(torch, known)

    def read(self, name: str) -> Any:
        """Return the tensor ``name`` [as stored], mapped from the file: do not write to it."""
        import torch

        described, dtype = self._header[name], self.dtype(name)
        begin, end = (self._data_begin + offset for offset in described["data_offsets"])
        if end == begin:
            return torch.empty(described["shape"], dtype=dtype)
        mapped, skipped = self._map(begin, end, name)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=skipped)
        if begin % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).reshape(described["shape"])

    def _read_header(self, stream: Any) -> tuple[dict[str, _Described], int]:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT_BYTES):
            raise ValueError(f"its header has a length of {length} bytes, the file has {size} bytes")
        header = loads_json(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        needed = 8 + length + _described_bytes(header)
        if needed != size:
            raise ValueError(f"it has {size} bytes, its header describes {needed}")
        return header, 8 + length

    def _map(self, begin: int, end: int, name: str) -> tuple[mmap.mmap, int]:
        """Map bytes ``begin`` to ``end`` of the file; return the map and their offset in it."""
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size < end:
                    raise OSError("the file has become shorter")
                # A private copy: torch warns about read-only memory, although nothing is written here.
                found = mmap.mmap(
                    stream.fileno(), end - begin + skipped, access=mmap.ACCESS_COPY, offset=begin - skipped
                )
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot read {name}: {error}. Download the shard again.") from error
        if hasattr(mmap, "MADV_WILLNEED"):
            found.madvise(mmap.MADV_WILLNEED)
        return found, skipped


def _described_bytes(header: dict[str, object]) -> int:
    """Count the bytes of all tensors of ``header``.

    ``ValueError`` unless they are contiguous, each with the length of its shape. The format requires this, and it
    prevents a header from requesting more memory than the file has.
    """
    places = []
    for name, described in header.items():
        begin, end, needed = _extent(name, described)
        if end - begin != needed:
            raise ValueError(f"{name[:80]} has {end - begin} bytes, its shape needs {needed}")
        places.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(places):
        if begin != at:
            raise ValueError(f"{name[:80]} begins at byte {begin}, the tensor before it ends at {at}")
        at = end
    return at


def _extent(name: str, described: Any) -> tuple[int, int, int]:
    """Return (first byte, byte after the last, number of bytes by type and shape) of a tensor."""
    if not isinstance(described, dict) or not {"dtype", "shape", "data_offsets"} <= set(described):
        raise ValueError(f"{name[:80]} has no dtype, shape and data_offsets")
    shape, offsets, dtype = described["shape"], described["data_offsets"], described["dtype"]
    whole = isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**48 for size in shape)
    if not whole or len(shape) > 8:
        raise ValueError(f"the shape of {name[:80]} is {str(shape)[:60]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int and at >= 0 for at in offsets):
        raise ValueError(f"the offsets of {name[:80]} are {str(offsets)[:60]}")
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of {name[:80]} is {str(dtype)[:60]}")
    if dtype not in _DTYPES:
        # A file may also contain types of newer releases, whose lengths are unknown.
        return offsets[0], offsets[1], offsets[1] - offsets[0]
    return offsets[0], offsets[1], math.prod(shape) * _DTYPES[dtype][1]


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return name -> shape of all tensors in the safetensors of ``folder``; None without any.

    A damaged file is left out: its reader reports what is wrong with it.
    """
    found: dict[str, tuple[int, ...]] = {}
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        with contextlib.suppress(ConfigError):
            file = SafetensorsFile(path)
            found |= {name: file.shape(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return found if paths else None
