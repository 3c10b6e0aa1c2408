"""The order of every stage's computations: 1F1B, interleaved 1F1B, all-forward-all-backward and combined 1F1B."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec.layout import SCHEDULES

MOST_SHOWN = 8
"""Number of group sizes that a message lists."""


class Action(NamedTuple):
    """One forward (``F``) or backward (``B``) of one microbatch on one chunk of a stage."""

    kind: str
    chunk: int
    microbatch: int
    paired: bool = False
    """Whether a backward overlaps the forward right before it, layer by layer (combined 1F1B)."""


Program = tuple[tuple[Action, ...], ...]
"""By stage, then in time order."""


@lru_cache(maxsize=256)
def make_program(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    microbatch_group_size: int = 0,
    paired: bool = False,
) -> Program:
    """Return the order of every stage in Megatron.

    ``num_chunks``: virtual pipeline size, 1 unless interleaved. ``microbatch_group_size``: consecutive microbatches of
    one chunk (Megatron's ``microbatch_group_size_per_vp_stage``), ``num_stages`` if 0. ``paired``: one more forward
    warms up, and then every forward and the following backward are one pass (``--overlap-moe-expert-parallel-comm``:
    with virtual stages, or one stage alone). Raises ``ConfigError``.
    """
    check_program(schedule, num_stages, num_microbatches, num_chunks, microbatch_group_size, paired)
    if schedule != "interleaved":
        chunk_order = [(microbatch, 0) for microbatch in range(num_microbatches)]
    else:
        group = microbatch_group_size or num_stages
        chunk_order = [
            (microbatch, chunk)
            for first in range(0, num_microbatches, group)
            for chunk in range(num_chunks)
            for microbatch in range(first, min(first + group, num_microbatches))
        ]
    forwards = [Action("F", chunk, microbatch) for microbatch, chunk in chunk_order]
    backwards = [Action("B", num_chunks - 1 - chunk, microbatch) for microbatch, chunk in chunk_order]
    total = len(forwards)
    program = []
    for stage in range(num_stages):
        if schedule == "gpipe":
            warmup = total
        elif schedule == "1f1b":
            warmup = min(total, num_stages - 1 - stage)
        else:
            group = microbatch_group_size or num_stages
            warmup = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * group
        # A pair's backward belongs to a microbatch whose forward has finished.
        warmup = min(total, warmup + paired)
        actions = forwards[:warmup]
        for step in range(total - warmup):
            actions += (forwards[warmup + step], backwards[step]._replace(paired=paired))
        program.append(tuple(actions + backwards[total - warmup :]))
    return tuple(program)


def check_program(
    schedule: str, num_stages: int, num_microbatches: int, num_chunks: int, microbatch_group_size: int, paired: bool
) -> None:
    """Raise ``ConfigError`` for arguments without a program."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}.")
    for name, size in (("pipeline size", num_stages), ("microbatches", num_microbatches), ("chunks", num_chunks)):
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}.")
    if paired and schedule != "interleaved" and (schedule != "1f1b" or num_stages > 1):
        raise ConfigError(
            f"combined 1F1B runs on one stage or with virtual stages, not {num_stages} stages of {schedule}."
        )
    if schedule != "interleaved":
        if num_chunks != 1:
            raise ConfigError(f"{num_chunks} chunks per stage need the interleaved schedule, not {schedule}.")
        return
    if num_stages < 2 or num_chunks < 2:
        raise ConfigError(f"interleaved needs 2 stages and 2 chunks or more, got {num_stages} and {num_chunks}.")
    _check_group_size(microbatch_group_size or num_stages, num_stages, num_microbatches)


def _check_group_size(group: int, num_stages: int, num_microbatches: int) -> None:
    if group <= num_microbatches and _is_group_size(group, num_stages, num_microbatches):
        return
    if num_microbatches < num_stages:
        raise ConfigError(
            f"interleaved: {num_microbatches} microbatches are fewer than the pipeline size {num_stages}. "
            f"Give at least {num_stages}."
        )
    legal = group_sizes(num_stages, num_microbatches)
    shown = ", ".join(map(str, legal[:MOST_SHOWN])) + (f", ... {legal[-1]}" if len(legal) > MOST_SHOWN else "")
    raise ConfigError(
        f"interleaved: {num_microbatches} microbatches do not run in groups of {group}, which must be {num_stages} "
        f"(the pipeline size) to {num_microbatches} with no remainder below {num_stages}. Possible: {shown}."
    )


def _is_group_size(group: int, num_stages: int, num_microbatches: int) -> bool:
    return group >= num_stages and not 0 < num_microbatches % group < num_stages


def group_sizes(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return every ``microbatch_group_size`` that Megatron accepts for ``num_microbatches``, smallest first.

    It accepts at least the number of stages and at most all microbatches, with no remainder below the number of stages.
    Empty if there are fewer microbatches than stages.
    """
    every = range(max(1, num_stages), num_microbatches + 1)
    return tuple(size for size in every if _is_group_size(size, num_stages, num_microbatches))


def in_flight(program: Program) -> tuple[int, ...]:
    """Return by stage the largest number of microbatch chunks whose activations are held at once."""
    peaks = []
    for actions in program:
        held = peak = 0
        for action in actions:
            held += 1 if action.kind == "F" else -1
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


_CELL = re.compile(r"(\+(?=B))?([FB])(\d+)\.(\d+)")


def program_to_text(program: Program) -> str:
    """Return the CSV, with a line end after every stage."""
    return "".join(
        ",".join(f"{'+' * a.paired}{a.kind}{a.chunk}.{a.microbatch}" for a in actions) + "\n" for actions in program
    )


def program_from_text(text: str) -> Program:
    """Return the program in ``text``; raises ``ConfigError`` that names the stage and the wrong cell."""
    program = []
    for stage, line in enumerate(text.splitlines()):
        actions = []
        for cell in line.split(","):
            found = _CELL.fullmatch(cell.strip())
            if found is None:
                raise ConfigError(f"schedule, stage {stage}: cell {cell!r} is not like F0.3 or B1.0.")
            actions.append(Action(found[2], int(found[3]), int(found[4]), bool(found[1])))
        program.append(tuple(actions))
    return tuple(program)
