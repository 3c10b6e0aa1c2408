"""The ``.metadata`` of a distributed checkpoint: unpickled without running anything, then checked."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import check_readable, shown
from mindspeed_autoparallel.weights.pickles import Placeholder

METADATA = ".metadata"


class _Record(Placeholder):
    """Stands for an object of torch.distributed.checkpoint, whose import takes as long as a conversion of 1 GiB."""

    offset: Any = None
    """Default of a field that ``MetadataIndex`` stores only if it is set."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__({"dtype": state[0]} if isinstance(state, tuple) else state)  # a tuple: TensorProperties


class _MetadataUnpickler(pickle.Unpickler):
    """``.metadata`` is a pickle by definition of the format: only the classes that describe tensors may be in it."""

    def find_class(self, module: str, name: str) -> Any:
        described = module.startswith("torch.distributed.checkpoint.") and name in {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_StorageInfo",
            "_StoragePrefix",
            "_MEM_FORMAT_ENCODING",
            # Newer Megatron's records of its save plan: plain data.
            "SavePlan",
            "WriteItem",
            "WriteItemType",
            "TensorWriteData",
        }
        plain = (module, name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("builtins", "set"),
        }
        if described:
            return type(name, (_Record,), {})
        if plain or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in checkpoint metadata")


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def read_metadata(folder: Path) -> Any:
    """Return the description of the tensors in a distributed checkpoint; ``ConfigError`` if it is damaged or contains
    anything else."""
    path = folder / METADATA
    check_readable(path, "metadata")
    try:
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ConfigError(
            f"{path} is not the metadata of a distributed checkpoint: {shown(str(error), 200)}."
        ) from error
    problem = _unlike_metadata(metadata)
    if problem:
        raise ConfigError(f"{path} is not the metadata of a distributed checkpoint: {problem}.")
    return metadata


def _unlike_metadata(metadata: Any) -> str:
    """Return the first deviation of an unpickled ``metadata`` from torch's format: its classes accept any value."""
    described, stored = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(described, dict) or not isinstance(stored, dict):
        return "it has no tables of tensors and data"
    for key, value in described.items():
        if not isinstance(key, str):
            return "a tensor has no name"
        if not hasattr(value, "chunks") and not hasattr(value, "size"):
            continue  # bytes
        size = getattr(value, "size", None)
        if not isinstance(size, (list, tuple)) or not all(type(one) is int and 0 <= one < 2**48 for one in size):
            return f"the shape of {shown(key)} is {shown(size)}"
        if not isinstance(getattr(value, "chunks", None), list) or not hasattr(value, "properties"):
            return f"{shown(key)} has no parts"
        for chunk in value.chunks:
            for name in ("offsets", "sizes"):
                numbers = getattr(chunk, name, None)
                if not isinstance(numbers, (list, tuple)) or not all(type(one) is int for one in numbers):
                    return f"a part of {shown(key)} has no {name}"
    for index, info in stored.items():
        offsets = getattr(index, "offset", ()) or ()
        if not isinstance(getattr(index, "fqn", None), str) or not isinstance(offsets, (list, tuple)):
            return "data belong to no tensor"
        numbers = (getattr(info, "offset", None), getattr(info, "length", None))
        if not all(type(one) is int and one >= 0 for one in numbers) or not isinstance(
            getattr(info, "relative_path", None), str
        ):
            return f"the data of {shown(index.fqn)} are at no place"
    return ""


def data_file(folder: Path, stored: Any) -> Path:
    """Return the file of ``stored``; ``ConfigError`` if it is not a plain file name in ``folder``."""
    name = str(stored.relative_path)
    path = folder / name
    if Path(name).name != name or path.is_symlink():
        raise ConfigError(f"{folder / METADATA} has data in {shown(name)}, which is not a file next to it.")
    if path.exists():
        check_readable(path, "data of a checkpoint")
    return path
