"""Shapes of tensors in files of ``torch.save``, without torch and without reading the tensors."""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, first_line


class _Shape(tuple[int, ...]):
    """The shape of a tensor, whose content is not read."""


class _Headers(pickle.Unpickler):
    """Reads the output of torch.save without its tensors; refuses any other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, *_: _Shape(size)
        if module == "torch" and (name.endswith("Storage") or name in ("bfloat16", "float16", "float32")):
            return name
        raise ConfigError(f"it holds {module}.{name}, which is not read.")

    def persistent_load(self, pid: Any) -> Any:
        return None


def shape_in(file: Path, key: str) -> tuple[int, ...]:
    """Return the shape of tensor ``key`` of a dictionary that ``torch.save`` wrote, from its header. Raises
    ``ConfigError``."""
    try:
        with zipfile.ZipFile(file) as opened:
            name = next(entry for entry in opened.namelist() if entry.endswith("/data.pkl"))
            held = _Headers(io.BytesIO(opened.read(name))).load()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except Exception as error:  # zipfile and pickle raise any exception for a damaged file
        raise ConfigError(f"cannot read {file} as a file of torch.save: {first_line(error)}.") from error
    shape = held.get(key) if isinstance(held, dict) else None
    if not isinstance(shape, _Shape):
        raise ConfigError(f"{file} holds no tensor {key!r}.")
    return tuple(shape)
