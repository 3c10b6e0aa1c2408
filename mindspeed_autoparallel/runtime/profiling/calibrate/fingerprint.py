"""Under which device and software the knowledge base keeps what was measured here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_HARDWARE = ("device", "num_cores", "num_threads")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Keys of the knowledge base; samples of other devices or releases never mix."""

    name: str
    """Of the device, as people say it."""
    device: str
    software: str

    def to_json(self) -> dict[str, str]:
        """Return it as plain JSON."""
        return asdict(self)


def fingerprint_of(device: Any) -> Fingerprint:
    """Return the keys of a device adapter."""
    found = device.fingerprint()
    hardware = " ".join(f"{key} {found[key]}" for key in _HARDWARE[1:] if found.get(key))
    return Fingerprint(
        name=found["device"],
        device=" ".join(filter(None, (found["device"], hardware))),
        software=" ".join(f"{key} {value}" for key, value in sorted(found.items()) if key not in _HARDWARE),
    )
