"""One safetensors file, read with plain reads into memory of its own.

The package's own reader maps the file: every page that was touched then counts as memory of the process until the file
is closed, and a conversion would hold its input beside its output. Format: 8 bytes length, JSON header, tensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights.memory import empty

_HEADER_LIMIT_BYTES = 100_000_000  # the format's own
# Reads of this size overlap with the kernel's reading ahead.
_READ_BYTES = 64 * 1024**2
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class SafetensorsFile:
    """Opened at ``path``; ``ConfigError`` if it is missing, cut off or not safetensors at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._header, self._data_begin = self._read_header(stream)
        except FileNotFoundError as error:
            raise ConfigError(f"shard {path} is missing. Download it again.") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"shard {path} is corrupt: {error}. Download it again.") from error

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._header)

    def read(self, name: str) -> Any:
        """The tensor ``name`` [as stored], in memory of its own."""
        import torch

        described = self._header[name]
        known = _DTYPES.get(described["dtype"])
        if known is None or not hasattr(torch, known):
            raise ConfigError(f"{self.path}: {name} is {described['dtype']}, which cannot be converted.")
        tensor = empty(described["shape"], getattr(torch, known))
        begin, end = described["data_offsets"]
        if tensor.nbytes != end - begin:
            raise ConfigError(f"shard {self.path} is corrupt: {name} has {end - begin} bytes. Download it again.")
        if tensor.nbytes:
            self._fill(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), self._data_begin + begin, name)
        return tensor

    def _read_header(self, stream: Any) -> tuple[dict[str, Any], int]:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT_BYTES):
            raise ValueError(f"its header says {length} bytes, the file has {size}")
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((int(one["data_offsets"][1]) for one in header.values()), default=0)
        if needed != size:
            raise ValueError(f"it has {size} bytes, its header describes {needed}")
        return header, 8 + length

    def _fill(self, buffer: memoryview, offset: int, name: str) -> None:
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(offset)
                filled = 0
                while filled < len(buffer):
                    count = stream.readinto(buffer[filled : filled + _READ_BYTES])
                    if not count:
                        raise OSError(f"the file ends after {filled} of {len(buffer)} bytes")
                    filled += count
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot read {name}: {error}. Download the shard again.") from error
