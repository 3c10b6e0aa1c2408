"""DualPipeV: the one split that MindSpeed runs, with its step time and peak memory.

Every rank holds two chunks with the same number of layers, and all layers have the same recompute policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem, fullest_moments
from mindspeed_autoparallel.planner.split.model.solution import Placement, fits, stage_memory, stage_times
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule import StepTimes, group_sizes, simulate
from mindspeed_autoparallel.schedule.dualpipev import DUALPIPEV, chain_stage, dualpipev_program
from mindspeed_autoparallel.units import MIB


@dataclass(frozen=True, kw_only=True)
class DualPipeVSplit:
    """The split that MindSpeed runs."""

    problem: SplitProblem
    """The pipeline, whose virtual stage ``chunk * num_stages + rank`` is that chunk of that rank."""
    placement: Placement
    recompute: str
    """Recompute policy of every layer."""
    step_time: float
    """Step time in nanoseconds."""
    stage_memory: tuple[int, ...]
    """Peak memory by rank, in bytes."""


def dualpipev_split(
    profile: Profile, *, num_stages: int, num_microbatches: int, memory_limit_mib: float
) -> DualPipeVSplit:
    """Return the split with the fastest recompute policy that fits; one policy applies to all layers.

    Raises ``ConfigError`` if MindSpeed refuses the configuration or would drop layers, and ``InfeasiblePlan`` if no
    policy fits.
    """
    _check(profile, num_stages)
    program = dualpipev_program(num_stages, num_microbatches)
    problem = problem_from_profile(
        profile,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        memory_limit_mib=memory_limit_mib,
        schedule="interleaved",
        num_chunks=2,
        microbatch_group_size=group_sizes(num_stages, num_microbatches)[0],
    )
    problem = replace(problem, in_flight=fullest_moments(program), sends=DUALPIPEV)
    kinds = sorted(
        (name for name in profile.measurements[0].modules[profile.model.modules[0].name].layer.recompute),
        key=lambda name: sum(_extra(problem, name)),
    )
    least: tuple[int, str] | None = None
    for kind in kinds:
        placement = _even(problem, kind)
        memory = stage_memory(problem, placement)
        if fits(problem, placement):
            forward, backward = stage_times(problem, placement)
            times = StepTimes(
                forward=forward, backward=backward, link=problem.link, per_operation=problem.per_operation
            )
            step = simulate(program, times, sends=DUALPIPEV).step_time
            return DualPipeVSplit(
                problem=problem, placement=placement, recompute=kind, step_time=step, stage_memory=memory
            )
        if least is None or max(memory) < least[0]:
            least = max(memory), kind
    assert least is not None
    raise InfeasiblePlan(
        f"DualPipeV does not fit in {memory_limit_mib:g} MiB per device: the fullest rank needs "
        f"{least[0] / MIB:.0f} MiB of tensors with recompute {least[1]} of every layer. Layers cannot be moved in this "
        "schedule: raise --pipeline-size, or use another schedule."
    )


def _check(profile: Profile, num_stages: int) -> None:
    (module, *others) = profile.model.modules
    if others:
        raise ConfigError(f"DualPipeV runs only language models, not {1 + len(others)} modules.")
    if profile.memory_semantics == "mindspeed":
        raise ConfigError("DualPipeV needs a profile of this tool: the end blocks of MindSpeed's file include layers.")
    if profile.model.tied_embeddings:
        raise ConfigError("MindSpeed refuses DualPipeV without --untie-embeddings-and-output-weights.")
    if profile.measurements[0].at.context_size > 1:
        raise ConfigError("MindSpeed refuses DualPipeV with context parallelism.")
    if num_stages < 2:
        raise ConfigError(f"DualPipeV needs 2 pipeline ranks or more, got {num_stages}.")
    if module.num_layers % (2 * num_stages):
        raise ConfigError(
            f"DualPipeV cuts {module.num_layers} layers into {2 * num_stages} equal chunks, rounded down, and would "
            f"drop {module.num_layers % (2 * num_stages)}: use a number of layers divisible by {2 * num_stages} "
            "(MindSpeed's --noop-layers fills up)."
        )


def _extra(problem: SplitProblem, name: str) -> list[int]:
    return [kind.extra_backward for segment in problem.segments for kind in segment.kinds if kind.name == name]


def _even(problem: SplitProblem, recompute: str) -> Placement:
    """Return the placement with the same number of layers in every chunk, in the order of the chain."""
    num = problem.num_stages
    places = {chain_stage(rank, chunk, num): chunk * num + rank for chunk in range(2) for rank in range(num)}
    num_layers = sum(segment.num_layers for segment in problem.segments if segment.beside is None)
    each, done = num_layers // (2 * num), 0
    placement: list[tuple[tuple[int, ...], ...]] = []
    for index, segment in enumerate(problem.segments):
        rows = [[0] * problem.num_virtual for _ in segment.kinds]
        if segment.beside is not None:
            rows[0][places[0 if index == 0 else 2 * num - 1]] = 1
        else:
            row = next(row for row, kind in zip(rows, segment.kinds, strict=True) if kind.name == recompute)
            for layer in range(done, done + segment.num_layers):
                row[places[layer // each]] += 1
            done += segment.num_layers
        placement.append(tuple(map(tuple, rows)))
    return tuple(placement)
