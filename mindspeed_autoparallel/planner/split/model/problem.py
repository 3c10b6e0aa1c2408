"""The split problem in integers: times in ticks, memory in any unit.

Virtual stage ``v`` of P stages is chunk ``v // P`` of stage ``v % P``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule import Program
from mindspeed_autoparallel.spec.legality import too_many_stages

MOST_LAYERS = 1024
"""Most layers of a model, several times those of the deepest models; the number of recompute choices of a stage grows
with the square of its layers."""
MOST_MEMORY = 2**55
"""Most memory of all layers together: 36 petabytes, so that 64-bit sums over a few dozen segments are exact."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One way to run a layer: activations kept, recomputed or offloaded."""

    name: str
    extra_backward: int = 0
    memory: tuple[int, ...]
    """By virtual stage: memory that a layer adds to its stage's peak, static memory and in-flight copies included, but
    without ``saved``."""
    transient: int = 0
    """Memory added once to a stage with such layers; the largest transient of its layers counts."""
    saved: int = 0
    """Memory per microbatch in flight, for problems with ``in_flight``."""


def order_of_kinds(num_kinds: int) -> tuple[int, ...]:
    """Return indices of kinds in their order on a stage: recomputing kinds first, the plain one last."""
    return (*range(1, num_kinds), 0)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of equal layers; a pre or post block is a segment of one layer."""

    name: str
    num_layers: int
    forward: int
    backward: int
    """Backward time in ticks; 0 if frozen."""
    kinds: tuple[LayerKind, ...]
    """Kinds, the plain one first."""
    predecessors: tuple[int, ...] = ()
    """Indices of segments that must be complete before this one begins; both may share a stage."""
    beside: int | None = None
    """Index of a segment that must have a layer on the same virtual stage, for pre and post blocks."""
    continues: bool = False
    """Whether it continues the stack of the segment before it with layers of other costs. On each stage the first
    layers of the stack run as ``kinds[1]``, the next ones as ``kinds[2]`` and so on, the last ones as ``kinds[0]``."""

    @property
    def order(self) -> tuple[int, ...]:
        """Return indices of ``kinds`` in their order on a stage."""
        return order_of_kinds(len(self.kinds))


@dataclass(frozen=True, kw_only=True)
class PostPipelineTime:
    """A stage's time after the pipeline (its tail), linear in its layers; with several rows the largest counts."""

    by_segment: tuple[int, ...]
    """Ticks per layer of each segment, negative if a layer hides more than it adds; a stage's sum is at least 0."""
    fixed: int = 0
    """Ticks added on stages with a layer whose ticks are not 0."""
    first_only: bool = False
    """Whether the row applies to the first stage only."""


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The last layer of segment ``before`` and the first ``num_layers`` of ``segment`` share one virtual stage."""

    before: int
    segment: int
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """The solver's input: segments, pipeline, schedule and memory limits."""

    segments: tuple[Segment, ...]
    num_stages: int
    num_microbatches: int
    memory_limit: tuple[int, ...]
    """Memory limit by stage, in the unit of ``LayerKind.memory``."""
    link: tuple[int, ...] = ()
    """Message ticks between virtual stages v and v + 1; empty: 0."""
    per_operation: int = 0
    """Ticks of host time added to every forward and backward of a stage."""
    schedule: str = "1f1b"
    num_chunks: int = 1
    sends: str = "eager"
    """Kind of sends (``schedule.SENDS``)."""
    allow_empty_stages: bool = False
    microbatch_group_size: int = 0
    """Consecutive microbatches of one chunk (interleaved); 0: the number of stages."""
    paired: bool = False
    """Combined 1F1B (interleaved): a forward and a backward of two microbatches run as one pass with both times."""
    in_flight: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """By stage, the moments at which memory may peak: microbatches in flight of each chunk. If empty,
    ``LayerKind.memory`` has the whole peak and ``saved`` does not count."""
    tails: tuple[PostPipelineTime, ...] = ()
    """The longest tail of all stages is added to the step."""
    joints: tuple[Joint, ...] = ()
    """Joints between a segment and one of its successors."""

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_chunks < 1 or self.num_microbatches < 1:
            raise ConfigError("pipeline size, chunks and microbatches must be at least 1.")
        if not self.segments:
            raise ConfigError("there is nothing to split: no segments.")
        if len(self.memory_limit) != self.num_stages:
            raise ConfigError(f"{len(self.memory_limit)} memory limits for {self.num_stages} stages.")
        if self.in_flight and (
            len(self.in_flight) != self.num_stages
            or any(not moments for moments in self.in_flight)
            or any(len(moment) != self.num_chunks for moments in self.in_flight for moment in moments)
        ):
            raise ConfigError("in_flight needs moments for every stage, each with a count per chunk.")
        if self.link and len(self.link) != self.num_virtual - 1:
            raise ConfigError(f"{len(self.link)} link times for {self.num_virtual} virtual stages.")
        for index, segment in enumerate(self.segments):
            if segment.num_layers < 1:
                raise ConfigError(f"{segment.name}: num_layers must be at least 1, got {segment.num_layers}.")
            if min(segment.forward, segment.backward) < 0 or not segment.kinds:
                raise ConfigError(f"{segment.name}: times must not be negative, and it needs at least one kind.")
            if any(before >= index for before in segment.predecessors):
                raise ConfigError(f"{segment.name}: its predecessors must come before it in the list.")
            for kind in segment.kinds:
                if len(kind.memory) != self.num_virtual or kind.extra_backward < 0 or min(kind.memory) < 0:
                    raise ConfigError(
                        f"{segment.name}, {kind.name}: it needs {self.num_virtual} memories and extra_backward, none "
                        "negative."
                    )
        names = [[kind.name for kind in segment.kinds] for segment in self.segments]
        for index, segment in enumerate(self.segments):
            if segment.continues and (not index or names[index] != names[index - 1]):
                raise ConfigError(f"{segment.name} must follow a segment of the same kinds to continue it.")
        if any(len(tail.by_segment) != len(self.segments) for tail in self.tails):
            raise ConfigError("a tail needs a time for every segment.")
        for joint in self.joints:
            if not 0 <= joint.before < joint.segment < len(self.segments):
                raise ConfigError("a joint needs two segments, the earlier one first.")
            if joint.num_layers > self.segments[joint.segment].num_layers:
                raise ConfigError(f"{self.segments[joint.segment].name} has no {joint.num_layers} layers to join.")
        layers = sum(segment.num_layers for segment in self.segments if segment.beside is None)
        if layers > MOST_LAYERS:
            raise ConfigError(f"the model has {layers} layers; a model of at most {MOST_LAYERS} can be split.")
        self._check_memory()
        # Parts of several modules are refused when the problem is solved.
        joined = sum(joint.num_layers for joint in self.joints)
        reason = too_many_stages(self.num_virtual, layers, num_joined=joined)
        if reason and not self.allow_empty_stages:
            most = max(1, (layers - joined) // self.num_chunks)
            raise ConfigError(f"{reason} Lower PP to {most} or below, or VPP.")

    def _check_memory(self) -> None:
        virtual = range(self.num_virtual)
        memory = sum(
            s.num_layers * max(self.most_memory(k, v) for k in s.kinds for v in virtual) for s in self.segments
        )
        if memory > MOST_MEMORY:
            raise ConfigError(
                f"the layers need {memory:,} bytes in all, more than {MOST_MEMORY:,}: check the model's sizes."
            )

    def tails_at(self, stage: int) -> tuple[PostPipelineTime, ...]:
        """Return the rows that apply to a stage's tail."""
        return tuple(tail for tail in self.tails if stage == 0 or not tail.first_only)

    @property
    def num_virtual(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return indices of the segments of every stack."""
        groups: list[tuple[int, ...]] = []
        for index, segment in enumerate(self.segments):
            groups.append((*groups.pop(), index) if segment.continues else (index,))
        return tuple(groups)

    def breaks_joint(self, counts: Any) -> Any:
        """Return a mask of the boundaries that split a joint.

        ``counts[..., segment]``: layers before each boundary. A boundary after the last layer of ``before`` must also
        be after the joined layers of ``segment``.
        """
        broken = counts[..., 0] < 0
        for joint in self.joints:
            missing = self.segments[joint.before].num_layers - counts[..., joint.before]
            broken = broken | (counts[..., joint.segment] < joint.num_layers * (1 - missing))
        return broken

    def moments(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return microbatches in flight by chunk, at every moment at which a stage's memory may peak."""
        return self.in_flight[stage] if self.in_flight else ((0,) * self.num_chunks,)

    def most_memory(self, kind: LayerKind, v: int) -> int:
        """Return a layer's memory on a virtual stage with the most copies in flight."""
        most = max(moment[v // self.num_stages] for moment in self.moments(v % self.num_stages))
        return kind.memory[v] + most * kind.saved

    def leanest(self, segment: Segment, v: int) -> LayerKind:
        """Return the kind with the least memory on a virtual stage."""
        return min(segment.kinds, key=lambda kind: self.most_memory(kind, v))


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
