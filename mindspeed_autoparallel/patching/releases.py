"""Which release of a host is on the path, and whether a patch supports it; no import of the host itself."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path

_FIELDS = ("MAJOR", "MINOR", "PATCH")


@lru_cache(maxsize=8)
def release_of(distribution: str) -> str:
    """Return ``0.19.2`` for ``megatron-core``, from its ``package_info.py`` (a checkout has no metadata); empty if
    unknown."""
    if distribution != "megatron-core":
        return ""
    source = _package_info()
    return release_in(source.parent) if source else ""


def release_in(core: Path) -> str:
    """Return the release of the ``megatron.core`` in folder ``core``; empty if its ``package_info.py`` has none."""
    try:
        text = (core / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    numbers = [re.search(rf"^{field}\s*=\s*(\d+)", text, re.MULTILINE) for field in _FIELDS]
    return ".".join(number.group(1) for number in numbers if number)


def _package_info() -> Path | None:
    try:
        parent = importlib.util.find_spec("megatron")
        # Looking up megatron.core itself would prepare the device (imports.py): that is done only if this fails.
        for folder in (parent.submodule_search_locations or ()) if parent else ():
            if (Path(folder) / "core" / "package_info.py").is_file():
                return Path(folder) / "core" / "package_info.py"
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).with_name("package_info.py") if spec and spec.origin else None


def within(release: str, specifier: str) -> bool:
    """Return whether ``release`` satisfies a PEP 440 specifier; ``ValueError`` if the specifier is invalid."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(release, prereleases=True)
