"""The pages' scripts and style sheets, which lie in ``static`` as files of their own kind."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

NUM_COLOURS = 8
"""Classes ``c0``, ``c1``, ... of report.css."""


@cache
def read_asset(name: str) -> str:
    """Return the text of a file in ``static``, to be put into a page that must not load anything."""
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")
