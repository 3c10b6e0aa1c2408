"""The picture of search time against devices, as SVG: no library needed."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log2, log10

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 50, 60
INSET = 34
"""Between the axes and the first and last point, so that labels have room."""
GOALS = ((128, 5.0), (1024, 15.0), (16384, 60.0))
"""(devices, seconds) that the search should stay below."""


def draw(points: Sequence[tuple[int, float]]) -> str:
    """``points``: (devices, seconds). Both axes are logarithmic."""
    devices = [size for size, _ in (*points, *GOALS)]
    seconds = [value for _, value in (*points, *GOALS)]
    low_x, high_x = floor(log2(min(devices))), ceil(log2(max(devices)))
    low_y, high_y = floor(log10(min(seconds))), ceil(log10(max(seconds)))

    def x(size: float) -> float:
        return LEFT + INSET + (log2(size) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT - 2 * INSET)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (log10(value) - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="16">plan, 32 + 80 layers: seconds of the whole command</text>',
    ]
    for power in range(low_x, high_x + 1):
        at = x(2**power)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ececec"/>')
        if (power - low_x) % 2 == 0:
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{2**power}</text>')
    for power in range(low_y, high_y + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#d8d8d8"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 15}" text-anchor="middle">devices</text>')
    line = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f6fb2" stroke-width="2"/>')
    for size, value in points:
        parts.append(f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="4" fill="#1f6fb2"/>')
        parts.append(f'<text x="{x(size):.1f}" y="{y(value) + 20:.1f}" text-anchor="middle">{value:.1f}</text>')
    for size, value in GOALS:
        left, right, at = x(size) - 16, x(size) + 16, y(value)
        parts.append(
            f'<line x1="{left:.1f}" y1="{at:.1f}" x2="{right:.1f}" y2="{at:.1f}" stroke="#c0392b" stroke-width="3"/>'
        )
        parts.append(
            f'<text x="{x(size):.1f}" y="{at - 8:.1f}" text-anchor="middle" fill="#c0392b">at most {value:g}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
