"""``torch.load`` of foreign checkpoints with ``weights_only=True`` only.

Training checkpoints carry the host's arguments and random states beside the tensors. The few plain classes these
are made of are replaced by inert placeholders while loading; anything else in the pickle is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import check_readable, shown

_PLAIN_PACKAGES = (
    "argparse",
    "types",
    "pathlib",
    "signal",
    "datetime",
    "numpy",
    "megatron",
    "mindspeed",
    "mindspeed_mm",
)


class Placeholder:
    """Stands for an object that is not needed; keeps nothing and runs nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def load_tensors_only(path: Path, *, mapped: bool = True) -> Any:
    """Return the content of ``path``, tensors mapped from the file; ``ConfigError`` if damaged or if it would run
    code."""
    import torch

    check_readable(path, "checkpoint")
    try:
        foreign = [
            name
            for name in torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            if name.partition(".")[0] in _PLAIN_PACKAGES
        ]
        # One class per name: the loader looks its name up by identity.
        stand_ins = [(type("Placeholder", (Placeholder,), {}), name) for name in foreign]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises a different class for each kind of damage
        lines = str(error).strip().splitlines()
        named = next((line.strip() for line in lines if "GLOBAL" in line or "nsupported" in line), "")
        reason = named or (lines[0] if lines else type(error).__name__)
        raise ConfigError(
            f"{path} is not a checkpoint that can be loaded safely: {shown(reason, 200)} "
            "It is read with weights_only=True only; save it again with torch.save of plain tensors."
        ) from error
