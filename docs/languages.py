"""The languages of generated pages. Texts of the Chinese ones are in ``zh/texts.json``, by the English text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

TEXTS = Path(__file__).parent / "zh" / "texts.json"


@dataclass(frozen=True)
class Language:
    """Calling it returns a text in the language; one without a translation stays English and joins ``missing``."""

    link: str
    """Label and folder of the same page in the other language, as Markdown with ``{page}`` for the file's name."""
    separator: str
    """Between the values of a list."""
    texts: dict[str, str] | None = None
    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> str:
        if self.texts is None or not text:
            return text
        if text not in self.texts:
            self.missing.append(text)
            return text
        self.used.add(text)
        return self.texts[text]

    @property
    def unused(self) -> list[str]:
        """Return the translations that no page has."""
        return sorted(set(self.texts or {}) - self.used)


def english() -> Language:
    """Return the language of the code."""
    return Language("[中文](zh/{page})", ", ")


def chinese() -> Language:
    """Return the language of ``docs/zh``."""
    return Language("[English](../{page})", "、", json.loads(TEXTS.read_text(encoding="utf-8")))
