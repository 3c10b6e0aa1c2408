"""Megatron's arguments by name, whatever they come from: a namespace, a log, a launch, a file."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown

_NO = ("false", "none", "null", "")


class Arguments:
    """Megatron's arguments by name, whatever their spelling: ``--num-layers`` and ``num_layers`` are one."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {str(name).lstrip("-").replace("-", "_"): value for name, value in values.items()}

    def has(self, name: str) -> bool:
        """Return whether ``name`` is there and says something."""
        return name in self._values and str(self._values[name]).lower() not in _NO

    def flag(self, name: str) -> bool:
        """Return whether a switch is on."""
        return self.has(name)

    def denied(self, name: str) -> bool:
        """Return whether ``name`` is there and off."""
        return name in self._values and not self.has(name)

    def text(self, *names: str) -> str | None:
        """Return the first of ``names`` that says something."""
        return next((str(self._values[name]) for name in names if self.has(name)), None)

    def integer(self, *names: str) -> int | None:
        """Return the first of ``names`` that says something, as a whole number."""
        number = self.number(*names)
        return None if number is None else int(number)

    def number(self, *names: str) -> float | None:
        """Return the first of ``names`` that says something, as a finite number."""
        text = self.text(*names)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"--{names[0].replace('_', '-')} is {shown(text)}, must be a number.")
        return number
