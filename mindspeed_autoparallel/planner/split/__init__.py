"""The inner problem: layers and recompute of every stage of one pipeline, solved to a proof."""

from mindspeed_autoparallel.planner.split.heuristics.baselines import Baseline, baselines
from mindspeed_autoparallel.planner.split.model.problem import Joint, LayerKind, PostPipelineTime, Segment, SplitProblem
from mindspeed_autoparallel.planner.split.model.solution import (
    NoneBelow,
    Placement,
    SplitSolution,
    StoppedEarly,
    stage_memory,
    step_of,
    time_of,
)
from mindspeed_autoparallel.planner.split.solver import solve

__all__ = [
    "Baseline",
    "Joint",
    "LayerKind",
    "NoneBelow",
    "Placement",
    "PostPipelineTime",
    "Segment",
    "SplitProblem",
    "SplitSolution",
    "StoppedEarly",
    "baselines",
    "solve",
    "stage_memory",
    "step_of",
    "time_of",
]
