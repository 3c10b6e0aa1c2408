"""Files are written whole or not at all, and read with errors that name them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_autoparallel.errors import ConfigError, first_line

T = TypeVar("T")
_MISPLACED = (errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
MAX_INPUT_BYTES = 64 * 1024**2
"""Size limit of a file that is read whole: parsed JSON takes up to twenty times its size."""
_MAX_DIGITS = 300
_MOST_VALUES = 100_000
"""Most values of a YAML file, with every alias written out."""
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def write_text_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` through a temporary file beside it and a rename, so that no reader sees half a file.

    Raises ``ConfigError`` naming the path when the folder is missing, not writable, or the disk is full.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write several files, each with ``write_text_atomic``; a reader that sees one also sees all earlier ones.

    All texts are on disk before the first file gets its name, so a full disk leaves every old file as it was.
    """
    temporary: dict[Path, Path] = {}
    path = Path()
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            temporary[path] = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        # mkstemp gives 0600; a result is as readable as any file the user makes.
        umask = os.umask(0)
        os.umask(umask)
        for path in list(texts)[:0:-1]:
            path.unlink(missing_ok=True)
        for path, made in temporary.items():
            made.chmod(0o666 & ~umask)
            made.replace(path)
    except OSError as error:
        for made in temporary.values():
            with contextlib.suppress(OSError):
                made.unlink()
        reason = error.strerror or str(error)
        way_out = "Choose another path." if error.errno in _MISPLACED else "Free space there or choose another folder."
        raise ConfigError(f"cannot write {path}: {reason}. {way_out}") from error


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON by ``write_text_atomic``; NaN and infinity are refused (``ValueError``)."""
    write_text_atomic(path, json_text(value))


def json_text(value: Any) -> str:
    """Return ``value`` as ``write_json_atomic`` writes it; bytes of a file name that are not UTF-8 become ``?``."""
    text = json.dumps(value, indent=2, allow_nan=False)
    if _HALF_PAIR.search(text.encode()):
        # Python decodes such a byte to half of a surrogate pair, which ``loads_json`` refuses.
        plain = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
        readable = plain.encode(errors="replace").decode()
        text = text if readable == plain else readable
    return text + "\n"


def made_folder(path: Path, flag: str) -> Path:
    """Return ``path``, created if missing and open for writing; a ``ConfigError`` that names ``flag`` is raised before
    any work is done."""
    fault = "cannot be a folder"
    try:
        path.mkdir(parents=True, exist_ok=True)
        fault = "cannot be written to"
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path} {fault}: {error.strerror or error}. Name another.") from error
    return path


def loads_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted source; the ``ValueError`` names the fault.

    Stricter than ``json.loads``: duplicate keys, NaN, infinity and whole numbers of more than 300 digits are
    refused, and nesting that is too deep for the parser is a ``ValueError``, too.
    """
    constants: list[str] = []

    def note(constant: str) -> float:
        constants.append(constant)
        return float(constant)

    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_int=_whole_number, parse_constant=note)
        if constants:
            key = _first_not_finite(value) or "it"
            raise ValueError(f"{shown(key)} is {constants[0]}, which is not a JSON number: give a finite one")
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be read") from error
    if _HALF_PAIR.search(text if isinstance(text, bytes) else text.encode(errors="replace")):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text in it has half of a surrogate pair, which is not a character") from error
    return value


def _first_not_finite(value: Any, at: str = "") -> str | None:
    """Return the path of the first number that is not finite, such as ``stages[0].forward_us``; ``None`` without
    one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else at
    if isinstance(value, dict):
        items = [(f"{at}.{key}" if at else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{at}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None
    return next((found for name, item in items if (found := _first_not_finite(item, name)) is not None), None)


def check_readable(path: Path, what: str) -> None:
    """Raise ``ConfigError`` if reading ``path`` could block or never end: a named pipe or a device.

    The pipe that a shell passes for ``<(command)``, below /dev or /proc, is allowed.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {what} {shown(path, 200)}: {reason}.") from error
    passed_by_shell = str(path).startswith(("/dev/fd/", "/proc/")) or str(path) == "/dev/stdin"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or passed_by_shell):
        raise ConfigError(f"cannot read {what} {shown(path, 200)}: it is not a regular file.")


def read_bytes(path: Path, what: str, max_bytes: int = MAX_INPUT_BYTES) -> bytes:
    """Read all of ``path``; ``ConfigError`` names ``what`` and the reason, or that it is too large."""
    check_readable(path, what)
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {what} {shown(path, 200)}: {reason}.") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{what} {shown(path, 200)} has more than the {max_bytes} bytes that are read at most.")
    return content


def read_text(path: Path, what: str, max_bytes: int = MAX_INPUT_BYTES) -> str:
    """Return ``read_bytes`` as UTF-8."""
    try:
        return read_bytes(path, what, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {what} {path}: byte {error.start} is not UTF-8 text.") from error


def read_json(path: Path, what: str) -> Any:
    """Return the JSON in ``path``; raises ``ConfigError`` that names ``what``, the file, and the line of a syntax
    error."""
    text = read_text(path, what)
    try:
        return loads_json(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{what} {path} is not valid JSON: {where}: {error.msg}.") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path} cannot be used: {error}.") from error


def read_as(path: Path, what: str, kind: type[T]) -> T:
    """Return the JSON in ``path`` as a ``kind`` of msgspec; ``ConfigError`` names ``what``, the file and what is
    wrong."""
    import msgspec

    try:
        return msgspec.json.decode(read_bytes(path, what), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be used: {error}.") from error


def parse_yaml(text: str, name: str) -> Any:
    """Return what ``yaml.safe_load`` reads in ``text``; ``ConfigError`` has ``name`` and the line of a syntax error."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(f"reading {name} needs PyYAML: pip install mindspeed-autoparallel[yaml]") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        parts = (getattr(error, "context", None), getattr(error, "problem", None))
        problem = ": ".join(part.partition("; first")[0] for part in parts if part) or type(error).__name__
        if mark and "duplicate anchor" in problem:
            key = text.splitlines()[mark.line].strip().partition(":")[0]
            problem += f" at {key!r}; the trainer's parser accepts an anchor once: remove or rename the second"
        raise ConfigError(f"{name} is not valid YAML: {where}{problem}.") from error
    except (RecursionError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is not valid YAML: {first_line(error)}.") from error
    if _expanded_size(tree) > _MOST_VALUES:
        raise ConfigError(f"{name} has aliases (*name) that stand for more than {_MOST_VALUES} values; write them out.")
    return tree


def _expanded_size(tree: Any) -> float:
    """Return the number of values of ``tree`` with every alias written out; infinity for an alias that contains
    itself."""
    sizes: dict[int, float] = {}

    def size(value: Any) -> float:
        if not isinstance(value, (dict, list)):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = float("inf")  # until its items are counted
            sizes[id(value)] = 1 + sum(size(item) for item in (value.values() if isinstance(value, dict) else value))
        return sizes[id(value)]

    return size(tree)


def printable(text: str) -> str:
    """Return ``text`` with ``?`` in place of characters that move the cursor or add lines: names may come from any
    file."""
    return "".join(one if one.isprintable() else "?" for one in text)


def shown(value: object, length: int = 60) -> str:
    """Return ``value`` for an error message: one printable line of at most ``length`` characters."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a number of more than 300 digits"
    text = value if isinstance(value, str) else str(value) if isinstance(value, Path) else repr(value)
    text = printable(text)
    return text if len(text) <= length else text[: length - 3] + "..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)!r} appears twice in one object")
        found[name] = value
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits)} digits")
    return int(digits)
