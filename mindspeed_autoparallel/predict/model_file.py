"""A model described in a file of one's own, for planning without a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json

_OWN_KEYS = ("name", "frozen")


@dataclass(frozen=True)
class Section:
    """One module of the model: ``shape`` as the ``model`` of a prediction request, whose ``seq`` counts its tokens."""

    name: str
    shape: Mapping[str, Any]
    frozen: bool = False


def read_model_file(path: Path) -> tuple[Section, ...]:
    """Return the modules in ``path``: a request's ``model``, a whole request, or ``{"modules": [...]}``, encoders
    first.

    Raises ``ConfigError`` with file and key.
    """
    content = read_json(path, "model file")
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict):
        raise ConfigError(f"model file {path} must be an object with num_layers, hidden, heads and seq, or modules.")
    modules = content.get("modules", [{"name": "text_decoder", **content}])
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"model file {path}: modules must be a list of objects, the text decoder last.")
    for index, module in enumerate(modules):
        if not isinstance(module.get("name"), str) or not module["name"]:
            raise ConfigError(f"model file {path}: modules[{index}].name is missing.")
    return tuple(
        Section(
            name=module["name"],
            shape={key: value for key, value in module.items() if key not in _OWN_KEYS},
            frozen=bool(module.get("frozen", False)),
        )
        for module in modules
    )
