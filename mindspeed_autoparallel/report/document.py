"""A page as one file: no network, no other files, one script that the page's policy names, in English and Chinese.

``static/zh.json`` maps English templates to Chinese ones. ``{}`` stands for any text, which is translated in turn if it
can be; the Chinese template inserts it in order, or by position (``{1}``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from html.parser import HTMLParser

from mindspeed_autoparallel.report.markup import element, embedded, read_asset, script_policy, text

_JOINTS = ((". ", "。"), ("; ", "；"), (" · ", " · "), (", ", "，"))
"""Separators of a text's parts, in English and in Chinese."""
_ATTRIBUTES = ("data-tip", "aria-label", "placeholder")


@cache
def _catalogue() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]], dict[str, str]]:
    """Return plain texts, templates (those with most letters first), and the scripts' texts."""
    held = json.loads(read_asset("zh.json"))
    exact = {english: chinese for english, chinese in held["page"].items() if "{}" not in english}
    templates = sorted((pair for pair in held["page"].items() if "{}" in pair[0]), key=lambda pair: -len(pair[0]))
    patterns = [
        (re.compile(re.escape(english).replace(r"\{\}", "(.+?)"), re.DOTALL), chinese) for english, chinese in templates
    ]
    return exact, patterns, held["script"]


@lru_cache(maxsize=4096)
def in_chinese(english: str) -> str | None:
    """Return the translation of a text; ``None`` if it is missing."""
    exact, patterns, _ = _catalogue()
    if english in exact:
        return exact[english]
    if (whole := _joined(english, in_part=False)) is not None:
        return whole
    for pattern, chinese in patterns:
        if found := pattern.fullmatch(english):
            return _filled(chinese, [in_chinese(part) or part for part in found.groups()])
    if english.endswith(".") and (whole := in_chinese(english[:-1])) is not None:
        return f"{whole}。"
    return _joined(english, in_part=True)


def _joined(english: str, *, in_part: bool) -> str | None:
    """Return the translation part by part; ``in_part``: keep parts without a translation."""
    for joint, mark in _JOINTS:
        parts = english.split(joint)
        if len(parts) > 1:
            translated = [in_chinese(part) for part in parts]
            if any(part is not None for part in translated) if in_part else all(translated):
                return mark.join(old if new is None else new for old, new in zip(parts, translated, strict=True))
    return None


def _filled(chinese: str, parts: list[str]) -> str:
    rest = iter(parts)
    return re.sub(r"\{(\d*)\}", lambda place: parts[int(place[1])] if place[1] else next(rest), chinese)


class _Texts(HTMLParser):
    """Collects the texts of a page as its script does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.update((value.strip(), None) for name, value in attrs if name in _ATTRIBUTES and value)

    def handle_data(self, data: str) -> None:
        self.found[data.strip()] = None


def texts_of(body: str) -> list[str]:
    """Return the distinct texts of ``body`` (markup), including tips and labels."""
    parser = _Texts()
    parser.feed(body)
    parser.close()
    return [text for text in parser.found if re.search("[A-Za-z]", text)]


def words_of(body: str) -> dict[str, str]:
    """Return the translations of the texts of ``body`` and of the scripts' texts."""
    *_, scripts = _catalogue()
    pairs = ((english, in_chinese(english)) for english in texts_of(body))
    return {**scripts, **{english: chinese for english, chinese in pairs if chinese is not None}}


def document(
    title: str,
    body: str,
    *,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
) -> str:
    """Return the whole page.

    ``body`` is markup; ``styles`` and ``scripts`` are files of ``static``, in addition to those of every page;
    ``values`` are embedded as JSON under their names, for the scripts.
    """
    buttons = element("button", "Light / dark", id="theme", type="button")
    buttons += element("button", "中文", id="language", type="button")
    body = element("div", buttons, class_="corner") + body
    script = "".join(map(read_asset, ("page.js", *scripts)))
    style = "".join(map(read_asset, ("report.css", *styles)))
    held = "".join(
        f'<script type="application/json" id="{name}">{embedded(value)}</script>\n'
        for name, value in {"words": words_of(body), **(values or {})}.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{script_policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<div id="tip" role="tooltip"></div>\n{held}<script>{script}</script>\n</body>\n</html>\n'
    )
