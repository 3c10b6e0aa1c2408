"""The context of every dimension."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """The request, what the host's parser made of the script's flags, and the device that will train."""

    request: TuningRequest
    arguments: argparse.Namespace
    device_name: str
    """``cpu``, ``cuda`` or ``npu``."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Dimension, or a value of it, to the reason; dimensions add to it."""

    def has(self, destination: str) -> bool:
        """Tell whether this Megatron has the argument."""
        return hasattr(self.arguments, destination)

    def value(self, destination: str, default: Any = None) -> Any:
        """Return the script's own value of an argument."""
        return getattr(self.arguments, destination, default)


def words(values: Iterable[Any]) -> str:
    """Return ``1, 2, 4`` or ``on, off``."""
    names = {True: "on", False: "off"}
    return ", ".join(names[value] if isinstance(value, bool) else str(value) for value in values)
