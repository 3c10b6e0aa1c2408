"""``torch.load`` of foreign checkpoints without running code in them: with ``weights_only=True``, or, for a pickle
protocol that torch's reader does not have, through an unpickler that builds tensors alone.

Training checkpoints contain the host's arguments and random states in addition to tensors. The few plain classes of
these are replaced by inert placeholders while loading; anything else in the pickle is refused by name.
"""

from __future__ import annotations

import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import check_readable, shown

_PLAIN_PACKAGES = (
    *("argparse", "types", "pathlib", "signal", "datetime", "numpy", "megatron", "mindspeed"),
    *("mindspeed_mm", "mindspeed_llm"),
)
_OF_TENSORS = (
    "builtins.dict",
    "collections.OrderedDict",
    "collections.defaultdict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch.Size",
    "torch.device",
)
"""Names in a pickle of tensors, in addition to types of values and of storages."""
_PROTOCOL = 2
"""Latest protocol that torch's own reader of weights supports; MindSpeed-LLM's converters write 4."""


class Placeholder:
    """Placeholder of an object that is not needed; stores nothing and runs nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _TensorsOnly(pickle.Unpickler):
    """Builds tensors, plain values and placeholders, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}" in _OF_TENSORS:
            return super().find_class(module, name)
        if module.partition(".")[0] in _PLAIN_PACKAGES:
            return type("Placeholder", (Placeholder,), {})
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")


def load_tensors_only(path: Path, *, mapped: bool = True) -> Any:
    """Return the content of ``path``, tensors mapped from the file; ``ConfigError`` if damaged or if it would run
    code."""
    import torch

    check_readable(path, "checkpoint")
    try:
        if _protocol(path) > _PROTOCOL:
            tensors_only = types.SimpleNamespace(__name__=__name__, Unpickler=_TensorsOnly)
            return torch.load(
                str(path), map_location="cpu", pickle_module=tensors_only, weights_only=False, mmap=mapped
            )
        foreign = [
            name
            for name in torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            if name.partition(".")[0] in _PLAIN_PACKAGES
        ]
        # One class per name: the loader looks up its name by identity.
        stand_ins = [(type("Placeholder", (Placeholder,), {}), name) for name in foreign]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises a different class for each kind of damage
        lines = str(error).strip().splitlines()
        named = next((line.strip() for line in lines if "GLOBAL" in line or "nsupported" in line), "")
        reason = named or (lines[0] if lines else type(error).__name__)
        raise ConfigError(
            f"{path} is not a checkpoint that can be loaded safely: {shown(reason, 200)} "
            "Nothing in it is run; save it again with torch.save of plain tensors."
        ) from error


def _protocol(path: Path) -> int:
    """Return the pickle protocol of a file of ``torch.save``; 0 for another kind of file.

    TorchScript archives are of another kind: only with ``weights_only=True`` does ``torch.load`` refuse them.
    """
    if not zipfile.is_zipfile(path):
        return 0
    with zipfile.ZipFile(path) as archive:
        entries = {name.rpartition("/")[2]: name for name in archive.namelist()}
        if "data.pkl" not in entries or "constants.pkl" in entries:
            return 0
        with archive.open(entries["data.pkl"]) as content:
            first, second = content.read(2)
    return second if first == pickle.PROTO[0] else 0
