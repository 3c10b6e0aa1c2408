"""Passwords and tokens on a command line, which must not get into files that people pass on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MASK = "***"
_ALWAYS = frozenset({"password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey", "bearer"})
_OWNERS = frozenset(
    {
        "access",
        "account",
        "api",
        "auth",
        "encryption",
        "hf",
        "hub",
        "huggingface",
        "modelscope",
        "private",
        "refresh",
        "session",
        "swanlab",
        "wandb",
    }
)
"""Whose key or token it is; other tokens and keys are those of language models (``--fim-eod-token``)."""
_URL = re.compile(r"(\w+://[^/\s:@]*):([^/\s@]+)@")


def masked_words(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``***`` in place of every value that its flag, or the password place of a URL, calls
    secret."""
    words = []
    following = False
    for word in argv:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            following = _is_secret(name)
            words.append(f"{name}={MASK}" if following and equals and value else _masked_url(word))
        else:
            words.append(MASK if following else _masked_url(word))
    return words


def secret_values(argv: Sequence[str]) -> frozenset[str]:
    """Return what ``masked_words`` takes away."""
    found = {match[2] for word in argv for match in _URL.finditer(word)}
    for word, masked in zip(argv, masked_words(argv), strict=True):
        if masked == MASK:
            found.add(word)
        elif masked.endswith("=" + MASK):
            found.add(word.partition("=")[2])
    return frozenset(found - {""})


def masked_text(text: str, values: Iterable[str]) -> str:
    """Return ``text`` with ``***`` in place of every one of ``values``."""
    # The longest first, for one may be part of another.
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable is called like something secret, whosever it is (``GITHUB_TOKEN``)."""
    return _is_secret(name) or re.split(r"_+", name.lower())[-1] in ("token", "key", "pat")


def _masked_url(word: str) -> str:
    return _URL.sub(rf"\1:{MASK}@", word)


def _is_secret(name: str) -> bool:
    words = [word for word in re.split(r"[-_]+", name.lower()) if word]
    if not words:
        return False
    return (
        not _ALWAYS.isdisjoint(words)
        or words == ["token"]
        or (words[-1] in ("token", "key") and not _OWNERS.isdisjoint(words[:-1]))
    )
