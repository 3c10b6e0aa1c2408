"""The variables and flags of a shell launch script, read without running it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError

_ASSIGNMENT = re.compile(r"^\s*(export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")


@dataclass(frozen=True, kw_only=True)
class Script:
    """``exports``: variables a started program sees; ``variables``: all; ``flags``: ``--name`` to its value or ""."""

    path: str = ""
    exports: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    launcher: str = ""
    """``torchrun``, ``python`` or empty when no start of a program was found."""

    def number(self, flag: str, default: int = 1) -> int | None:
        """Return the value of ``flag`` as a count; None if it is there but cannot be read without running the
        script."""
        value = self.flags.get(flag, self.flags.get(flag.replace("-", "_").replace("__", "--", 1)))
        if value is None:
            return default
        return int(value) if value.isdigit() else None


def read_script(path: Path) -> Script:
    """Raise ``ConfigError`` if the file cannot be read."""
    try:
        return parse_script(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read script {path}: {getattr(error, 'strerror', None) or error}.") from error


def parse_script(text: str, path: str = "") -> Script:
    """Return plain assignments, ``${NAME}``, ``$(( ))`` of whole numbers; conditions and loops are not followed."""
    exports: dict[str, str] = {}
    variables: dict[str, str] = {}
    words: list[str] = []
    launcher = ""
    for line in _logical_lines(text):
        match = _ASSIGNMENT.match(line)
        if match:
            name, value = match.group(2), _evaluate(_unquote(match.group(3)), variables)
            variables[name] = value
            if match.group(1):
                exports[name] = value
            continue
        if re.match(r"^\s*export\s+[A-Za-z_]\w*\s*$", line):
            name = line.split()[1]
            exports[name] = variables.get(name, "")
            continue
        command = _words(_evaluate(line, variables))
        programs = (word.rsplit("/", 1)[-1] for word in command)
        started = next((name for name in programs if re.fullmatch(r"torchrun|python3?", name)), "")
        if started:
            launcher = "torchrun" if started == "torchrun" or "torch.distributed.run" in command else "python"
            words = command
    return Script(path=path, exports=exports, variables=variables, flags=_flags(words), launcher=launcher)


def _logical_lines(text: str) -> list[str]:
    """Return lines with continuations joined and quoted line breaks kept inside one line."""
    lines, current = [], ""
    for raw in text.replace("\\\n", " ").splitlines():
        if not current and raw.lstrip().startswith("#"):
            continue
        current = f"{current} {raw}" if current else raw
        if current.count('"') % 2 == 0:
            lines.append(current)
            current = ""
    return [*lines, current] if current else lines


def _unquote(value: str) -> str:
    value = value.strip()
    if value[:1] in ("'", '"') and value.count(value[0]) >= 2:
        return value[1 : value.index(value[0], 1)]
    return value.partition(" #")[0].strip()


def _evaluate(text: str, variables: dict[str, str]) -> str:
    def arithmetic(match: re.Match[str]) -> str:
        inside = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1].replace("$", ""))
        return _calculate(inside.replace("{", "").replace("}", ""), match[0])

    text = _ARITHMETIC.sub(arithmetic, text)
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), text)


def _calculate(expression: str, otherwise: str) -> str:
    """Return whole-number products and quotients, left to right; ``otherwise`` for anything else."""
    parts = re.findall(r"\d+|\S", expression)
    if not parts or len(parts) % 2 == 0 or not all(part.isdigit() for part in parts[::2]):
        return otherwise
    result = int(parts[0])
    for sign, number in zip(parts[1::2], map(int, parts[2::2]), strict=True):
        if sign == "*":
            result *= number
        elif sign == "/" and number:
            result //= number
        else:
            return otherwise
    return str(result)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _flags(words: list[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = words[position + 1] if position + 1 < len(words) else "--"
            flags[name] = value if equals else ("" if following.startswith("--") else following)
    return flags
