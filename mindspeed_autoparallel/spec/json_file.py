"""Records that are a JSON file of their own, with a format and a version."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.files import json_text, read_json, shown, write_text_atomic
from mindspeed_autoparallel.spec.codec import from_json, to_json

Record = TypeVar("Record", bound="JsonFile")


class JsonFile:
    """Base of dataclasses that are written to a file of their own; ``format`` and ``schema_version`` have defaults."""

    format: str
    schema_version: int
    WHAT: ClassVar[str]
    """Name of the file in messages."""
    AGAIN: ClassVar[str]
    """How to make a file of this version."""
    ERROR: ClassVar[type[AutoParallelError]]

    def text(self) -> str:
        """Return the JSON as ``write`` writes it."""
        return json_text(to_json(self))

    def sha256(self) -> str:
        """Return a hash of the content, independent of the file's formatting."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the record as JSON, atomically."""
        write_text_atomic(path, self.text())

    @classmethod
    def read(cls: type[Record], path: Path) -> Record:
        """Read and check a file; raises ``ERROR`` for a foreign one, another version, or broken contents."""
        return cls.parse(read_json(path, cls.WHAT.removesuffix(" of this tool")), str(path))

    @classmethod
    def parse(cls: type[Record], value: Any, where: str = "") -> Record:
        """Return the record from parsed JSON; ``where`` names it in messages."""
        where = where or cls.WHAT
        found = value.get("format") if isinstance(value, dict) else None
        if found != cls.format:
            own = "" if found is None else f"is {shown(repr(found))}, "
            raise cls.ERROR(f"{where} is not a {cls.WHAT} (key 'format' {own}should be {cls.format!r}). {cls.AGAIN}")
        if value.get("schema_version") != cls.schema_version:
            raise cls.ERROR(
                f"{where} has schema_version {shown(value.get('schema_version'))}; this release reads "
                f"{cls.schema_version}. {cls.AGAIN}"
            )
        return from_json(cls, value, where, cls.ERROR)
