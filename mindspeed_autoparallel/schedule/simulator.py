"""Exact replay of a program: the longest path through its event graph, and that path.

The graph depends on the program and the kind of sends alone: it is sorted once and kept. Times stay what they are: with
integers everything is exact, and fractions are allowed (the path is still a valid lower bound on any other times).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule.programs import Action, Program

Time = float
Row = Sequence[Time] | Time


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times in any one unit, by virtual stage (``chunk * num_stages + stage``)."""

    forward: Sequence[Row]
    """A number, or one per microbatch."""
    backward: Sequence[Row]
    link: Sequence[Time] = ()
    """Between virtual stage i and i + 1, either direction; empty: 0."""
    per_operation: Time = 0
    """Host time added to every forward and backward."""
    per_message: Time = 0
    """Added to every message, beside ``link``."""


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

    def bubble(self, stage: int) -> Time:
        return self.step_time - self.busy[stage]


class _Graph:
    """Nodes in topological order; node 0 is the start. Every node waits for up to three others."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int, int, int, int, int]] = []
        """Three (node, link) pairs flattened; link ``-1`` costs nothing, missing waits are node 0."""
        self.work: list[tuple[int, Action] | None] = []


def simulate(
    program: Program, times: StepTimes, *, rendezvous: bool = False, with_timeline: bool = False
) -> SimulatedStep:
    """Replay ``program``.

    ``rendezvous``: every send blocks until its receiver is there, as Megatron's non-interleaved 1F1B does; otherwise a
    message travels while both sides compute. ``timeline`` and ``critical_path`` are empty unless ``with_timeline``.
    """
    num_stages = len(program)
    if rendezvous and any(action.chunk for action in program[0]):
        raise ConfigError("rendezvous sends are those of the non-interleaved schedules: use eager for interleaved.")
    graph = _compile(program, rendezvous)
    extra, message = times.per_operation, times.per_message
    num_virtual = len(times.forward)
    links = [message + (times.link[i] if times.link else 0) for i in range(num_virtual - 1)] + [0]
    count = max(action.microbatch for action in program[0]) + 1
    rows = {
        "F": [_row(row, count, extra) for row in times.forward],
        "B": [_row(row, count, extra) for row in times.backward],
    }
    durations: list[Time] = [0]
    durations += [
        0 if work is None else rows[work[1].kind][work[1].chunk * num_stages + work[0]][work[1].microbatch]
        for work in graph.work[1:]
    ]
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
    return _trace(graph, program, ends, durations, links, num_virtual, with_timeline)


def _row(row: Row, count: int, extra: Time) -> list[Time]:
    if isinstance(row, Sequence):
        if len(row) != count:
            raise ConfigError(f"{len(row)} times for {count} microbatches.")
        return [value + extra for value in row]
    return [row + extra] * count


def _trace(
    graph: _Graph, program: Program, ends: list[Time], durations: list[Time], links: list[Time],
    num_virtual: int, with_timeline: bool,
) -> SimulatedStep:  # fmt: skip
    num_stages = len(program)
    node = max(range(len(ends)), key=ends.__getitem__)
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
        a, link_a, b, link_b, c, link_c = graph.waits[node]
        best, link = max(
            ((a, link_a), (b, link_b), (c, link_c) if c else (a, link_a)),
            key=lambda wait: ends[wait[0]] + links[wait[1]],
        )
        if with_timeline and links[link]:
            path.append(("p2p", links[link]))
        node = best
    busy: list[Time] = [0] * num_stages
    timeline = []
    for index, work in enumerate(graph.work):
        if work is not None and with_timeline:
            busy[work[0]] += durations[index]
            timeline.append((work[0], work[1], ends[index] - durations[index], ends[index]))
    return SimulatedStep(
        step_time=step_time, busy=tuple(busy), num_forwards=tuple(forwards), num_backwards=tuple(backwards),
        critical_path=tuple(reversed(path)), timeline=tuple(timeline),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _compile(program: Program, rendezvous: bool) -> _Graph:
    steps = [_exchanges(stage, program) if rendezvous else list(actions) for stage, actions in enumerate(program)]
    num_stages = len(program)
    last_virtual = num_stages * (1 + max(action.chunk for action in program[0])) - 1
    graph = _Graph()
    graph.waits.append((0, -1, 0, -1, 0, -1))
    graph.work.append(None)
    last, position = [0] * num_stages, [0] * num_stages
    done: dict[tuple[str, int, int], int] = {}
    posted: dict[tuple[int, str, int, int], int] = {}
    left = sum(map(len, steps))
    while left:
        moved = False
        for stage in range(num_stages):
            while position[stage] < len(steps[stage]):
                step = steps[stage][position[stage]]
                waits = [(last[stage], -1)]
                if isinstance(step, Action):
                    virtual = step.chunk * num_stages + stage
                    before = virtual - 1 if step.kind == "F" else virtual + 1
                    if not rendezvous and 0 <= before <= last_virtual:
                        found = done.get((step.kind, before, step.microbatch))
                        if found is None:
                            break
                        waits.append((found, min(before, virtual)))
                    done[step.kind, virtual, step.microbatch] = len(graph.work)
                else:
                    for mine, _, _, _ in step:
                        posted.setdefault(mine, last[stage])
                    if any(theirs not in posted for _, theirs, _, _ in step):
                        break
                    waits = [(posted[theirs], link) for _, theirs, link, _ in step]
                    waits.append((last[stage], max((link for _, _, link, _ in step), default=-1)))
                    if len({link for _, _, link, _ in step}) > 1:
                        # Both links delay this rank too: a node that waits for the second link alone.
                        extra = min(link for _, _, link, _ in step)
                        graph.waits.append((last[stage], extra, 0, -1, 0, -1))
                        graph.work.append(None)
                        graph.waits.append((*waits[0], *waits[1], len(graph.work) - 1, -1))
                        graph.work.append(None)
                        waits = [(len(graph.work) - 1, -1), waits[-1]]
                waits += [(0, -1)] * (3 - len(waits))
                graph.waits.append((*waits[0], *waits[1], *waits[2]))
                graph.work.append((stage, step) if isinstance(step, Action) else None)
                last[stage] = len(graph.work) - 1
                position[stage] += 1
                left -= 1
                moved = True
        if not moved:
            raise ConfigError("this program deadlocks: every stage waits for another.")
    return graph


_Message = tuple[tuple[int, str, int, int], tuple[int, str, int, int], int, str]


def _exchanges(stage: int, program: Program) -> list[Action | list[_Message]]:
    """The stage's computations with its blocking messages between them, grouped as Megatron groups them."""
    last = len(program) - 1
    actions = program[stage]
    steps: list[Action | list[_Message]] = []

    def message(kind: str, microbatch: int, sends: bool) -> list[_Message]:
        peer = stage + 1 if (kind == "F") == sends else stage - 1
        if not 0 <= peer <= last:
            return []
        mine, theirs = (stage, kind, microbatch, int(sends)), (peer, kind, microbatch, int(not sends))
        return [(mine, theirs, min(stage, peer), kind)]

    first = actions[0]
    steps.append(message("F", first.microbatch, False))
    for index, action in enumerate(actions):
        steps.append(action)
        following = actions[index + 1] if index + 1 < len(actions) else None
        send = message(action.kind, action.microbatch, True)
        receive = message(following.kind, following.microbatch, False) if following else []
        # Megatron pairs a send with the opposite-direction receive; forward after forward goes one by one.
        if following is not None and following.kind != action.kind:
            steps.append(send + receive)
        else:
            steps += [send, receive]
    return [step for step in steps if step]
