"""A page as one file: no network, no other files, one script that the page's policy names, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_autoparallel.report.markup import element, embedded, read_asset, script_policy, text
from mindspeed_autoparallel.report.words import words_of


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
