"""The variables and commands of a bash script, read without running it: arrays, defaults, sourced files.

Values that are unknown without running it stay as written (``$(hostname)``, ``$1``, unset variables), and so do
variables set in a condition or a loop; words that these add to an array are marked (``MAYBE``).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.expansion import Values, expand

MAYBE = "\0"
"""Prefix of a word that a condition adds."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPENING = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSING = frozenset({"fi", "done", "esac"})
_SKIPPED = frozenset({"then", "else", "elif", "do", "!", "time", "exec", "nohup", "sudo", "eval", "{"})
_DOCUMENT = re.compile(r"(?<!<)<<(?!<)-?\s*['\"]?(\w+)['\"]?")
_MAX_DEPTH, _MAX_SOURCED = 8, 200
_MAX_NESTED = 100
"""Most levels of nested quotes and substitutions."""
_MAX_WORD, _MAX_TOTAL = 2**17, 2**24
"""Most characters of one word (Linux's limit for an argument), and of all words of a script."""


@dataclass
class Reading:
    """The contents read so far; ``commands`` in order, each as its words."""

    values: Values = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Sourced files that could not be found."""
    num_characters: int = 0
    """Characters of all words so far."""
    num_sourced: int = 0

    def expanded(self, words: list[str]) -> list[str]:
        """Return ``words`` with their variables; ``ConfigError`` if they exceed the limits of a program's arguments."""
        found = []
        for word in words:
            self.spend(len(word))
            for item in expand(word, self.values):
                found.append(item)
                self.spend(len(item))
        return found

    def spend(self, num_characters: int) -> None:
        """Count characters read; ``ConfigError`` if a launch script cannot need as many."""
        self.num_characters += num_characters
        if num_characters > _MAX_WORD or self.num_characters > _MAX_TOTAL:
            raise ConfigError(
                f"the script's variables grow beyond {_MAX_WORD} characters per word or {_MAX_TOTAL} in all: no "
                "program starts with more. Look for a variable that is appended to itself."
            )


def read_bash(text: str, folder: Path, read: Callable[[Path], str | None], depth: int = 0) -> Reading:
    """Read ``text`` as bash would run it in ``folder``; ``read`` gives a sourced file's text, ``None`` without one."""
    reading = Reading()
    _run(text, folder, read, reading, depth)
    return reading


def _run(text: str, folder: Path, read: Callable[[Path], str | None], reading: Reading, depth: int) -> None:
    nested = 0
    for words in statements(text):
        while words and (words[0] in _SKIPPED | _OPENING | _CLOSING or words[0] == "}"):
            nested += (words[0] in _OPENING) - (words[0] in _CLOSING)
            words = words[1:] if words[0] in _SKIPPED or words[0] in _CLOSING or words[0] == "}" else []
        if (len(words) > 1 and words[1] in ("()", "(){")) or (words and words[0].endswith(("()", "(){"))):
            continue
        exported = bool(words) and words[0] in ("export", "declare", "local", "readonly")
        shown = exported and words[0] == "export"
        words = words[1:] if exported else words
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            _assign(match, reading, maybe=nested > 0)
            if shown:
                reading.exports[match[1]] = " ".join(reading.values[match[1]])
            words = words[1:]
        if exported:
            for name in words:
                if shown and name in reading.values:
                    reading.exports[name] = " ".join(reading.values[name])
            continue
        if words and words[0] in ("source", ".") and len(words) > 1:
            _source(" ".join(expand(words[1], reading.values)), folder, read, reading, depth)
        elif words:
            reading.commands.append(reading.expanded(words))


def _assign(match: re.Match[str], reading: Reading, *, maybe: bool) -> None:
    name, more, text = match.groups()
    values = reading.values
    is_array = text.startswith("(") and text.endswith(")")
    if is_array:
        found = reading.expanded([word for row in statements(text[1:-1]) for word in row])
    else:
        found = [" ".join(expand(text, values, split=False))]
    before = values.get(name)
    if maybe and more:
        marked = [MAYBE + word for item in found for word in item.split()]
        values[name] = [*(before or []), *marked] if is_array else [" ".join([*(before or []), *marked])]
    elif maybe and before != found:
        values[name] = [f"${name}"]
    elif more and is_array:
        values[name] = [*(before or []), *found]
    else:
        values[name] = ["".join([*(before or []), *found])] if more else found
    reading.spend(sum(map(len, values[name])) if not is_array else len(values[name]))


def _source(path: str, folder: Path, read: Callable[[Path], str | None], reading: Reading, depth: int) -> None:
    # The start of the path, a command or an unset variable, is unknown: look for its end in the script's parent
    # folders.
    known = re.split(r"[)}`]/|\$\w+/", path)[-1]
    around = (folder, *folder.absolute().parents[:3])
    places = [Path(path), *(place / known for place in around)] if known == path else [p / known for p in around]
    for place in places:
        text = read(place) if depth < _MAX_DEPTH else None
        if text is not None:
            reading.num_sourced += 1
            if reading.num_sourced > _MAX_SOURCED:
                raise ConfigError(f"the script sources more than {_MAX_SOURCED} files: does {path} source itself?")
            _run(text, folder, read, reading, depth + 1)
            return
    reading.unread.append(path)


def statements(text: str) -> Iterator[list[str]]:
    """Split ``text`` into simple commands and these into raw words: quotes, arrays and ``$( )`` stay whole."""
    text = _without_documents(text)
    words: list[str] = []
    word = ""
    index = 0
    while index < len(text):
        char = text[index]
        if char == "#" and not word:
            index = len(text) if (end := text.find("\n", index)) < 0 else end
            continue
        if char in "'\"`" or text.startswith(("$(", "${"), index) or (char == "(" and word.endswith("=")):
            end = _end_of(text, index)
            # An array's words are split later: a backslash does not end a comment there, either.
            word += text[index:end] if char == "(" else text[index:end].replace("\\\n", " ")
            index = end
            continue
        if char == "\\" and index + 1 < len(text) and text[index + 1] != "\n":
            word += text[index : index + 2]
            index += 2
            continue
        index += 2 if char == "\\" else 1
        if char.isspace() or char in ";|&\\":
            if word:
                words.append(word)
                word = ""
            if char not in " \t\\" and words and not (char == "&" and text[index : index + 1] == ">"):
                yield words
                words = []
        else:
            word += char
    if word:
        words.append(word)
    if words:
        yield words


def _end_of(text: str, start: int, depth: int = 0) -> int:
    """Return the index after the quote, substitution or parenthesis that begins at ``start``."""
    if depth > _MAX_NESTED:
        raise ConfigError(f"the script nests quotes and substitutions more than {_MAX_NESTED} deep.")
    if text[start] == "'" or text[start] == "`":
        end = text.find(text[start], start + 1)
        return len(text) if end < 0 else end + 1
    if text[start] == '"':
        closing, index = '"', start + 1
    else:
        index = start + 1 if text[start] == "(" else start + 2
        closing = "}" if text.startswith("${", start) else ")"
    while index < len(text):
        char = text[index]
        if char == closing:
            return index + 1
        if char == "\\":
            index += 2
        elif char == "#" and closing == ")" and text[index - 1].isspace():
            index = len(text) if (end := text.find("\n", index)) < 0 else end
        elif text.startswith(("$(", "${"), index) or char in "`" or (closing != '"' and char in "'\"("):
            index = _end_of(text, index, depth + 1)
        else:
            index += 1
    return len(text)


def _without_documents(text: str) -> str:
    """Drop the bodies of ``<<END`` documents."""
    lines = text.split("\n")
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(number)
    kept, number = [], 0
    while number < len(lines):
        kept.append(lines[number])
        begun = _DOCUMENT.search(lines[number])
        ends = places.get(begun[1], []) if begun else []
        after = bisect.bisect_right(ends, number)
        number = ends[after] + 1 if after < len(ends) else number + 1
    return "\n".join(kept)
