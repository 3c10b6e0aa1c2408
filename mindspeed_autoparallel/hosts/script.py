"""The variables and flags of a shell launch script, read without running it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, destination_of
from mindspeed_autoparallel.files import read_text
from mindspeed_autoparallel.hosts.shell import MAYBE, read_bash, statements

_MAX_BYTES = 2**20
_MAX_QUOTED = 3
"""Most levels of quoted commands inside quoted commands."""
_PROGRAM = re.compile(r"torchrun|python3?(\.\d+)?|msrun|deepspeed")


@dataclass(frozen=True, kw_only=True)
class Script:
    """``exports``: environment of a started program; ``variables``: all; ``flags``: ``--name`` to its value or ""."""

    path: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    launcher: str = ""
    """``torchrun``, ``python`` or empty when no start of a program was found."""
    program: str = ""
    """The started Python file, as written; empty if none was found."""
    conditional: frozenset[str] = frozenset()
    """Flags, with dashes, that a condition adds, so that their presence is unknown."""
    unread: tuple[str, ...] = ()
    """Words for further flags that could not be read: ``$EXTRA_ARGS``, and files that could not be sourced."""

    def given(self, flag: str) -> str | None:
        """Return the value of ``flag`` in either spelling, ``None`` if it is missing."""
        for spelled in (flag, "--" + destination_of(flag)):
            if spelled in self.flags:
                return self.flags[spelled]
        return None

    def number(self, flag: str, default: int = 1) -> int | None:
        """Return the value of ``flag`` as a count; ``None`` if it cannot be read without running the script."""
        value = self.given(flag)
        if flag in self.conditional:
            return None
        if value is None:
            return None if self.unread else default
        return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None


def read_script(path: Path) -> Script:
    """Raise ``ConfigError`` if the file cannot be read."""
    return parse_script(read_text(path, "script", max_bytes=_MAX_BYTES), str(path))


def parse_script(text: str, path: str = "") -> Script:
    """Read the script's variables, and the program that it starts with the most flags."""
    reading = read_bash(text, Path(path).parent, _text_of)
    launches = [words for command in reading.commands for words in _launches(command)]
    words = max(reversed(launches), key=lambda launch: sum(word.startswith("--") for word in launch), default=[])
    flags, conditional = _flags(words)
    launcher = ""
    if words:
        distributed = words[0].rsplit("/", 1)[-1] == "torchrun" or "torch.distributed.run" in words
        distributed |= "torch.distributed.launch" in words
        launcher = "torchrun" if distributed else "python"
    return Script(
        path=path,
        exports=reading.exports,
        variables={name: " ".join(value).replace(MAYBE, "") for name, value in reading.values.items()},
        flags=flags,
        launcher=launcher,
        program=next((word for word in words if word.endswith(".py")), ""),
        conditional=frozenset(conditional),
        unread=tuple(word for before, word in itertools.pairwise(words) if _stands_for_flags(word, before)),
    )


def _text_of(path: Path) -> str | None:
    try:
        return read_text(path, "script", max_bytes=_MAX_BYTES) if path.is_file() else None
    except (OSError, ValueError, ConfigError):  # ValueError: a NUL in the name
        return None


def _launches(command: list[str], depth: int = 0) -> list[list[str]]:
    """Return the Python programs that a command starts, with their words, including those inside a quoted command."""
    if depth > _MAX_QUOTED:
        return []
    for index, word in enumerate(command):
        if _PROGRAM.fullmatch(word.rsplit("/", 1)[-1]):
            return [command[index:]]
    quoted = [word for word in command if " " in word and re.search(r"torchrun|python", word)]
    return [found for word in quoted for words in statements(word) for found in _launches(words, depth + 1)]


def _stands_for_flags(word: str, before: str) -> bool:
    """Return whether ``word`` is an unset variable in a flag's position, not a value's."""
    return not before.startswith("--") and bool(re.fullmatch(r"\$\{?[A-Za-z_]\w*(\[[@*]\])?\}?", word))


def _flags(words: list[str]) -> tuple[dict[str, str], set[str]]:
    flags: dict[str, str] = {}
    conditional: set[str] = set()
    for position, word in enumerate(words):
        name, equals, value = word.lstrip(MAYBE).partition("=")
        if not name.startswith("--"):
            continue
        following = words[position + 1].lstrip(MAYBE) if position + 1 < len(words) else "--"
        flags[name] = value if equals else ("" if following.startswith("--") else following)
        if word.startswith(MAYBE):
            conditional.add(name.replace("_", "-"))
    return flags, conditional
