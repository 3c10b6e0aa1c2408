"""Pipeline schedules as programs of actions, and one exact simulator for all of them."""

from mindspeed_autoparallel.schedule.batch import BatchPath, BatchSimulator
from mindspeed_autoparallel.schedule.folding import ProgramSizes, program_of_peaks, simulate_folded
from mindspeed_autoparallel.schedule.programs import (
    Action,
    Program,
    check_program,
    group_sizes,
    in_flight,
    make_program,
    program_from_text,
    program_to_text,
)
from mindspeed_autoparallel.schedule.simulator import SimulatedStep, StepTimes, simulate
from mindspeed_autoparallel.spec.layout import SCHEDULES, SENDS

__all__ = [
    "SCHEDULES",
    "SENDS",
    "Action",
    "BatchPath",
    "BatchSimulator",
    "Program",
    "ProgramSizes",
    "SimulatedStep",
    "StepTimes",
    "check_program",
    "group_sizes",
    "in_flight",
    "make_program",
    "program_from_text",
    "program_of_peaks",
    "program_to_text",
    "simulate",
    "simulate_folded",
]
