"""Passwords and tokens on a command line, which must not get into files that people pass on."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Sequence

MASK = "***"
_ALWAYS = frozenset(
    {
        *("password", "passwd", "pwd", "passphrase", "secret", "credential", "credentials"),
        *("apikey", "accesskey", "secretkey", "securitytoken", "bearer"),
    }
)
_WHOLE = frozenset({("token",), ("ak",), ("sk",), ("pat",)})
"""``--ak`` and ``--sk`` are the access and secret key of Huawei Cloud."""
_OWNERS = frozenset(
    {
        *("access", "account", "api", "auth", "encryption", "hf", "hub", "huggingface", "modelscope", "private"),
        *("refresh", "session", "swanlab", "wandb"),
    }
)
"""Services whose keys and tokens are secret; other tokens belong to language models (``--fim-eod-token``)."""
_URL = re.compile(r"(\w+://[^/\s:@]*):([^/\s]+)@")
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    + "|".join(
        (
            r"gh[pousr]_[A-Za-z0-9]{20,}",  # GitHub
            r"github_pat_[A-Za-z0-9_]{20,}",
            r"gl(?:pat|dt|rt|cbt|ptt)-[\w-]{16,}",  # GitLab
            r"hf_[A-Za-z0-9]{20,}",  # Hugging Face
            r"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])",  # Amazon
            r"sk-(?:(?:proj|ant|svcacct|or)-[\w-]{16,}|[A-Za-z0-9]{20,})",  # OpenAI, Anthropic, DeepSeek
            r"xox[abeoprs]-[\w-]{10,}",  # Slack
            r"AIza[\w-]{35}",  # Google
            r"ya29\.[\w-]{20,}",
            r"pypi-[\w-]{16,}",
            r"npm_[A-Za-z0-9]{30,}",
            r"LTAI[A-Za-z0-9]{12,}",  # Alibaba Cloud
            r"AKID[A-Za-z0-9]{16,}",  # Tencent Cloud
            r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*",  # JWT
        )
    )
    + ")"
)
"""Secrets recognised by their form, one pattern per issuer."""
_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""Shell variables that are not passwords, despite their names."""
_SHORTEST_ENCODED = 6
"""The base64 of a shorter value can occur in other words by chance."""


def masked_words(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``***`` in place of every value that its flag, the password place of a URL, or its own form
    (``ghp_...``, a JWT) shows to be secret."""
    words = []
    following = False
    for word in argv:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            following = _is_secret(name)
            words.append(f"{name}={MASK}" if following and equals and value else _masked_value(word))
        else:
            named = bool(equals and value) and _is_secret(name)
            words.append(MASK if following else f"{name}={MASK}" if named else _masked_value(word))
    return words


def secret_values(argv: Sequence[str]) -> frozenset[str]:
    """Return the values that ``masked_words`` removes, as they are and in base64."""
    found = {match[2] for word in argv for match in _URL.finditer(word)}
    found |= {match[0] for word in argv for match in _KNOWN.finditer(word)}
    for word, masked in zip(argv, masked_words(argv), strict=True):
        if masked == MASK:
            found.add(word)
        elif masked.endswith("=" + MASK):
            found.add(word.partition("=")[2])
    return with_encoded(found - {""})


def with_encoded(values: Iterable[str]) -> frozenset[str]:
    """Return ``values`` and the base64 of those of at least six characters, as HTTP's basic authentication has it."""
    found = set(values)
    for value in list(found):
        if len(value) >= _SHORTEST_ENCODED:
            content = value.encode(errors="surrogateescape")
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                # Without the padding: its last characters depend on what follows.
                found.update(_core(encode, content, before) for before in range(3))
    return frozenset(found)


def known_values(text: str) -> frozenset[str]:
    """Return the secrets in ``text`` that are recognised by their form."""
    return frozenset(match[0] for match in _KNOWN.finditer(text)) | {match[2] for match in _URL.finditer(text)}


def _core(encode: Callable[[bytes], bytes], content: bytes, before: int) -> str:
    """Return the base64 characters that depend on ``content`` alone when it starts ``before`` bytes after a group of
    three, such as in ``user:password``."""
    encoded = encode(b"\0" * before + content).decode().rstrip("=")
    whole = (before + len(content)) * 8 // 6
    return encoded[(before * 8 + 5) // 6 : whole]


def masked_text(text: str, values: Iterable[str]) -> str:
    """Return ``text`` with ``***`` in place of every one of ``values``."""
    # The longest first: one may be part of another.
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def is_secret_variable(name: str) -> bool:
    """Return whether the name of an environment variable suggests a secret of any service (``GITHUB_TOKEN``)."""
    if name in _FOLDERS:
        return False
    return _is_secret(name) or re.split(r"_+", name.lower())[-1] in ("token", "key", "pat", "ak", "sk")


def _masked_value(word: str) -> str:
    return _KNOWN.sub(MASK, _URL.sub(rf"\1:{MASK}@", word))


def _is_secret(name: str) -> bool:
    words = [word for word in re.split(r"[-_.]+", name.lower()) if word]
    if not words:
        return False
    return (
        not _ALWAYS.isdisjoint(words)
        or tuple(words) in _WHOLE
        or (words[-1] in ("token", "key") and not _OWNERS.isdisjoint(words[:-1]))
    )
