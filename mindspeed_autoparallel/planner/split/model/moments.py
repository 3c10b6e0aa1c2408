"""The moments at which a rank of an interleaved pipeline may be fullest: microbatches in flight of each chunk."""

from __future__ import annotations

from functools import lru_cache

from mindspeed_autoparallel.schedule import Program


@lru_cache(maxsize=64)
def fullest_moments(program: Program) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return by stage the counts by chunk of every moment that no other moment equals or exceeds in all chunks.

    For any activation sizes of the chunks, the stage's peak is at one of them.
    """
    num_chunks = 1 + max(action.chunk for action in program[0])
    found: list[tuple[tuple[int, ...], ...]] = []
    for actions in program:
        now = [0] * num_chunks
        seen: dict[tuple[int, ...], None] = {}
        for index, action in enumerate(actions):
            now[action.chunk] += 1 if action.kind == "F" else -1
            following = actions[index + 1] if index + 1 < len(actions) else None
            # Another forward follows, so this moment is not the fullest.
            if action.kind == "F" and (following is None or following.kind == "B"):
                seen[tuple(now)] = None
        moments = list(seen)
        found.append(
            tuple(
                moment
                for moment in moments
                if not any(
                    other != moment and all(a >= b for a, b in zip(other, moment, strict=True)) for other in moments
                )
            )
        )
    return tuple(found)
