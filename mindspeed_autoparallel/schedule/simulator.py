"""Exact replay of a program: the longest path through its event graph, and that path.

The graph depends only on the program and the kind of sends: it is sorted once and cached. Times keep their type:
integer times give exact results, and fractions are allowed (the path is still a valid lower bound on any other times).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule.dualpipev import DUALPIPEV, dualpipev_steps
from mindspeed_autoparallel.schedule.event_graph import EventGraph, take_all
from mindspeed_autoparallel.schedule.exchanges import MET, Meet, met_steps
from mindspeed_autoparallel.schedule.messages import Message, Post, SendReceive, Step, Wait, both_posted, message_steps
from mindspeed_autoparallel.schedule.programs import Action, Program

Time = float
Row = Sequence[Time] | Time


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times in any unit, by virtual stage (``chunk * num_stages + stage``)."""

    forward: Sequence[Row]
    """By virtual stage a number, or one per microbatch."""
    backward: Sequence[Row]
    link: Sequence[Time] = ()
    """Between virtual stage i and i + 1, either direction; empty: 0."""
    per_operation: Time = 0
    """Host time added to every forward and backward."""
    per_pass: Sequence[Time] = ()
    """Additional host time per pass, by virtual stage; empty: 0."""
    per_message: Time = 0
    """Time added to every message, in addition to ``link``."""
    paired_saving: Mapping[tuple[int, int], Time] = field(default_factory=dict)
    """By virtual stages of a forward and of its paired backward: time saved compared with running them separately.
    Missing: 0."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """The replay of one step."""

    step_time: Time
    busy: tuple[Time, ...]
    """By stage: time spent computing; the rest of the step is bubble."""
    num_forwards: tuple[int, ...]
    """By virtual stage: forwards on the critical path."""
    num_backwards: tuple[int, ...]
    critical_path: tuple[tuple[str, Time], ...]
    """Segments (label, duration) in time order; their durations add up to ``step_time``. Labels: ``F2.0.5`` (kind,
    stage, chunk, microbatch), or ``p2p``."""
    timeline: tuple[tuple[int, Action, Time, Time], ...]
    """(stage, action, start, end) of every computation."""

    starts: tuple[Time, ...] = ()
    """By stage: the start of its first forward."""
    finishes: tuple[Time, ...] = ()
    """By stage: the end of its last pass."""


@dataclass(frozen=True)
class Replayed:
    """Every event of one step; lists are by node of the graph."""

    graph: EventGraph
    ends: list[Time]
    durations: list[Time]
    links: list[Time]
    """By virtual stage that the link follows; the last one costs nothing."""

    def waited_for(self, node: int) -> tuple[int, int]:
        """Return the node that ``node`` waited for longest, and the link between."""
        ends, links = self.ends, self.links
        longest, link, b, link_b, c, link_c = self.graph.waits[node]
        until = ends[longest] + links[link]
        if ends[b] + links[link_b] > until:
            longest, link, until = b, link_b, ends[b] + links[link_b]
        if c and ends[c] + links[link_c] > until:
            return c, link_c
        return longest, link

    def last(self) -> int:
        """Return the node that ends last."""
        return max(range(len(self.ends)), key=self.ends.__getitem__)


def simulate(
    program: Program, times: StepTimes, *, rendezvous: bool = False, sends: str = "", with_timeline: bool = False
) -> SimulatedStep:
    """Replay ``program``.

    ``rendezvous``: a message waits for its receiver, Megatron's default; otherwise it is sent while both sides compute.
    ``sends``: one of ``schedule.SENDS`` instead, to match settings and release exactly. ``timeline`` and
    ``critical_path`` are empty unless ``with_timeline``.
    """
    if not sends:
        interleaved = rendezvous and any(action.chunk for action in program[0])
        sends = "freed" if interleaved else "blocking" if rendezvous else "eager"
    return traced(replayed(program, times, sends), with_timeline=with_timeline)


def replayed(program: Program, times: StepTimes, sends: str) -> Replayed:
    """Return the end of every event of ``program``; ``sends``: one of ``schedule.SENDS``."""
    graph = compile_graph(program, sends)
    extra, message = times.per_operation, times.per_message
    num_virtual = len(times.forward)
    links = [message + (times.link[i] if times.link else 0) for i in range(num_virtual - 1)] + [0]
    count = max(action.microbatch for action in program[0]) + 1
    rows = [
        _row(row, count, extra + more)
        for more, *pair in zip(times.per_pass or [0] * num_virtual, times.forward, times.backward, strict=True)
        for row in pair
    ]
    rows += [
        _less(rows[2 * virtual + 1], times.paired_saving.get((ahead, virtual), 0)) for ahead, virtual in graph.pairs
    ]
    durations: list[Time]
    if any(isinstance(row, list) for row in rows):
        durations = [
            _at(rows[index - 1], work[1].microbatch) if work is not None else 0
            for index, work in zip(graph.rows, graph.work, strict=True)
        ]
    else:
        durations = list(map([0, *rows].__getitem__, graph.rows))  # type: ignore[arg-type]  # plain numbers only
    ends: list[Time] = [0]
    append = ends.append
    for (a, link_a, b, link_b, c, link_c), duration in zip(graph.waits[1:], durations[1:], strict=True):
        start = ends[a] + links[link_a]
        other = ends[b] + links[link_b]
        if other > start:
            start = other
        if c:
            other = ends[c] + links[link_c]
            if other > start:
                start = other
        append(start + duration)
    return Replayed(graph, ends, durations, links)


def _row(row: Row, count: int, extra: Time) -> Time | list[Time]:
    if isinstance(row, Sequence):
        if len(row) != count:
            raise ConfigError(f"{len(row)} times for {count} microbatches.")
        return [value + extra for value in row]
    return row + extra


def _less(row: Time | list[Time], saving: Time) -> Time | list[Time]:
    return [value - saving for value in row] if isinstance(row, list) else row - saving


def _at(row: Time | list[Time], microbatch: int) -> Time:
    return row[microbatch] if isinstance(row, list) else row


def traced(found: Replayed, *, with_timeline: bool = False) -> SimulatedStep:
    """Return the critical path of a replay, and the rest of the record."""
    graph, ends, durations = found.graph, found.ends, found.durations
    num_stages, num_virtual, node = graph.num_stages, graph.num_virtual, found.last()
    first, last = graph.bounds()
    step_time = ends[node]
    forwards, backwards = [0] * num_virtual, [0] * num_virtual
    path: list[tuple[str, Time]] = []
    while node:
        work = graph.work[node]
        if work is not None:
            stage, action = work
            (forwards if action.kind == "F" else backwards)[action.chunk * num_stages + stage] += 1
            if with_timeline:
                path.append((f"{action.kind}{stage}.{action.chunk}.{action.microbatch}", durations[node]))
        node, link = found.waited_for(node)
        if with_timeline and found.links[link]:
            path.append(("p2p", found.links[link]))
    busy: list[Time] = [0] * num_stages
    timeline = []
    for index, work in enumerate(graph.work):
        if work is not None and with_timeline:
            busy[work[0]] += durations[index]
            timeline.append((work[0], work[1], ends[index] - durations[index], ends[index]))
    return SimulatedStep(
        step_time=step_time,
        busy=tuple(busy),
        num_forwards=tuple(forwards),
        num_backwards=tuple(backwards),
        critical_path=tuple(reversed(path)),
        timeline=tuple(timeline),
        starts=tuple(ends[index] - durations[index] for index in first),
        finishes=tuple(ends[index] for index in last),
    )


@functools.lru_cache(maxsize=256)
def compile_graph(program: Program, sends: str) -> EventGraph:
    """Sort the events of a program and kind of sends once. Raises ``ConfigError`` for a program that deadlocks."""
    steps: Sequence[Sequence[Step | Meet]]
    if sends == DUALPIPEV:
        steps = dualpipev_steps(len(program), 1 + max(action.microbatch for action in program[0]))
    elif sends == MET:
        steps = met_steps(len(program), 1 + max(action.microbatch for action in program[0]))
    else:
        steps = message_steps(program, sends)
    num_stages = len(program)
    last_virtual = num_stages * (1 + max(action.chunk for action in program[0])) - 1
    graph = EventGraph(num_stages, last_virtual + 1)
    graph.add((0, -1))
    last = [0] * num_stages
    done: dict[tuple[str, int, int], int] = {}
    posted: dict[Message, int] = {}
    arrived: dict[Meet, dict[int, int]] = {}
    met: dict[Meet, int] = {}

    def take(stage: int, step: Step | Meet) -> bool:
        if isinstance(step, Meet):
            waiting = arrived.setdefault(step, {})
            waiting[stage] = last[stage]
            if len(waiting) < num_stages:
                return False
            if step not in met:
                met[step] = functools.reduce(lambda one, other: graph.add((one, -1), (other, -1)), waiting.values())
            last[stage] = met[step]
            return True
        if isinstance(step, Action):
            virtual = step.chunk * num_stages + stage
            before = virtual - 1 if step.kind == "F" else virtual + 1
            waits = [(last[stage], -1)]
            if sends == "eager" and 0 <= before <= last_virtual:
                found = done.get((step.kind, before, step.microbatch))
                if found is None:
                    return False
                waits.append((found, min(before, virtual)))
            last[stage] = done[step.kind, virtual, step.microbatch] = graph.add(*waits, work=(stage, step))
            return True
        if not both_posted(step, last[stage], posted):
            return False
        if not isinstance(step, Post):
            last[stage] = _through(graph, step, last[stage], posted)
        return True

    take_all(steps, take)
    return graph


def _through(graph: EventGraph, step: Wait | SendReceive, last: int, posted: dict[Message, int]) -> int:
    """Return the node at which a rank continues: all messages have taken their link's time since both sides posted
    them."""
    if isinstance(step, SendReceive):
        links = {message.boundary for message in step.messages}
        if len(links) == 1 and len(step.messages) <= 2:
            # One node for all: this side posted them at ``last``.
            waits = [(posted[message.other_side], message.boundary) for message in step.messages]
            return graph.add((last, links.pop()), *waits)
    for message in step.messages:
        link = message.boundary
        last = graph.add((last, -1), (posted[message.other_side], link), (posted[message], link))
    return last
