"""The moments at which memory of an interleaved pipeline's rank may peak: microbatches in flight of each chunk."""

from __future__ import annotations

from functools import lru_cache

from mindspeed_autoparallel.schedule import Program


@lru_cache(maxsize=64)
def fullest_moments(program: Program) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return by stage the microbatches in flight of each chunk, at every moment that no other moment dominates.

    Whatever the chunks' activation sizes, the stage's peak is at one of these moments.
    """
    num_chunks = 1 + max(action.chunk for action in program[0])
    found: list[tuple[tuple[int, ...], ...]] = []
    for actions in program:
        now = [0] * num_chunks
        seen: dict[tuple[int, ...], None] = {}
        for index, action in enumerate(actions):
            now[action.chunk] += 1 if action.kind == "F" else -1
            following = actions[index + 1] if index + 1 < len(actions) else None
            # Memory is fullest after the last forward of a run of forwards.
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
