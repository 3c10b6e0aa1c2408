"""Bash's expansion of one word, as far as possible without running anything."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

Values = dict[str, list[str]]
"""Variable to its words; a plain variable has one."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_PIECE = re.compile(
    r"(?P<arithmetic>\$\(\((?:[^()]|\([^()]{0,999}\)){0,999}\)\))|(?P<command>\$\([^)]{0,4999}\)|`[^`]{0,4999}`)"
    r"|\$\{(?P<braced>(?:[^{}]|\$\{[^{}]{0,999}\}){0,4999})\}|\$(?P<plain>[A-Za-z_]\w*|[@*#?0-9])"
)
"""Repetitions are bounded, so that thousands of unclosed openings do not take quadratic time."""
_BRACED = re.compile(r"(?P<name>[A-Za-z_]\w*|[@*0-9])(?P<index>\[[@*]\])?(?P<rest>.*)", re.DOTALL)


def expand(word: str, values: Values, *, split: bool = True) -> list[str]:
    """Return the expansion of ``word``; with ``split``, unquoted values are split at spaces."""
    parts: list[str] = [""]
    for quote, text in _quoted_parts(word):
        if quote == "'":
            parts[-1] += text
            continue
        position = 0
        for match in _PIECE.finditer(text):
            parts[-1] += text[position : match.start()]
            position = match.end()
            found = _value(match, values)
            if not quote and split:
                found = [piece for item in found for piece in (item.split() if item.strip() else [])]
            if found:
                parts[-1] += found[0]
                parts += found[1:]
            elif text == match[0] and len(parts) == 1 and not parts[0]:
                return []
        parts[-1] += text[position:]
    return parts


def _quoted_parts(word: str) -> list[tuple[str, str]]:
    """Split a raw word into (quote, text); a backslash escapes the next character."""
    found: list[tuple[str, str]] = []
    for match in re.finditer(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|((?:\\.|[^'\"])+)", word, re.DOTALL):
        single, double, plain = match.groups()
        if single is not None:
            found.append(("'", single))
        elif double is not None:
            found.append(('"', re.sub(r"\\([\"\\$`])", r"\1", double)))
        else:
            found.append(("", re.sub(r"\\(.)", r"\1", plain or "", flags=re.DOTALL)))
    return found


def _value(match: re.Match[str], values: Values) -> list[str]:
    written = match[0]
    if match["arithmetic"]:
        return [_calculated(written[3:-2], values, written)]
    if match["command"]:
        return [written]
    if match["plain"]:
        name = match["plain"]
        return [] if name in "@*" else values.get(name, [written])[:1]
    braced = _BRACED.fullmatch(match["braced"])
    if braced is None:
        return [written]
    name, index, rest = braced["name"], braced["index"], braced["rest"]
    known = values.get(name)
    if name in ("@", "*"):
        return []  # the script is started without arguments
    if known is None or known == [""]:
        default = re.fullmatch(r":?[-=](.*)", rest, re.DOTALL)
        if default is not None:
            return expand(default[1], values, split=False)
        return [] if index else [written] if known is None and not rest.startswith((":+", "+")) else [""]
    if rest.startswith((":+", "+")):
        return expand(rest.lstrip(":")[1:], values, split=False)
    if rest and not re.match(r":?[-=?]", rest):
        return [written]
    return list(known) if index else known[:1]


def _calculated(expression: str, values: Values, otherwise: str) -> str:
    """Return the whole number that ``expression`` evaluates to, or ``otherwise``."""
    plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression).strip()
    plain = re.sub(r"[A-Za-z_]\w*", lambda name: (values.get(name[0]) or [name[0]])[0], plain)
    try:
        return str(_number(ast.parse(plain.replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return otherwise


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("not a whole number")
