"""A program as CSV: one line per stage, cells like ``F0.3`` (forward, chunk 0, microbatch 3).

``+B1.0`` is a backward that overlaps the forward before it.
"""

from __future__ import annotations

import re

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule.programs import Action, Program

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
