"""Units: bytes, microseconds. Quantities in this package end in their unit (``_us``, ``_bytes``, ``_bytes_per_s``)."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
NS_PER_MS = 1_000_000
US_PER_MS = 1000.0
US_PER_S = 1_000_000.0
MAX_DURATION_US = 1e12
"""Eleven days: a larger value in a file cannot be a measurement, and sums of such values would overflow 64 bits."""


def counted(number: int, noun: str) -> str:
    """Return ``1 batch``, ``3 batches``, ``2 stages``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def format_bytes(num_bytes: float) -> str:
    """Return ``71.4 GiB``, ``512.0 MiB``, ``3.0 KiB``: the largest unit that leaves a number of at least one."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes:.0f} B"


def format_us(duration_us: float) -> str:
    """Return ``1.93 s``, ``41.2 ms``, ``17 us``."""
    if abs(duration_us) >= US_PER_S:
        return f"{duration_us / US_PER_S:.2f} s"
    if abs(duration_us) >= US_PER_MS:
        return f"{duration_us / US_PER_MS:.1f} ms"
    return f"{duration_us:.0f} us"
