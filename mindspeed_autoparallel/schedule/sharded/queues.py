"""In-order queues of one device on one clock, and the live bytes in program order."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.schedule.sharded.training import Unit

COMPUTE = "compute"
COPY_IN = "copy in"
GATHER = "gather"
REDUCE = "reduce"
ALL_REDUCE = "all-reduce"
HOST = "host copies"
QUEUES = (COMPUTE, COPY_IN, GATHER, REDUCE, ALL_REDUCE, HOST)

Span = tuple[str, object, int, int]


class Moment(int):
    """A moment, with the operation that ends at it: the dependency of a waiting queue."""

    operation: int = -1


class Queues:
    """In-order queues; an event is the moment at which a queue reaches it."""

    def __init__(self, with_spans: bool) -> None:
        self.now: dict[str, int] = dict.fromkeys(QUEUES, Moment(0))
        self.operations: list[tuple[object, int, int]] = []
        """Operation, its duration, and the index of the operation that it waited for (-1: none)."""
        self.busy = dict.fromkeys(QUEUES, 0)
        self.spans: list[Span] = []
        self._with_spans = with_spans

    def run(self, queue: str, what: object, duration_ns: int) -> int:
        """Append an operation of ``duration_ns`` to ``queue``; return the moment at which it ends."""
        start = self.now[queue]
        if not duration_ns:
            return start
        end = Moment(start + duration_ns)
        end.operation = len(self.operations)
        self.operations.append((what, duration_ns, getattr(start, "operation", -1)))
        self.now[queue] = end
        self.busy[queue] += duration_ns
        if self._with_spans:
            self.spans.append((queue, what, start, end))
        return end

    def mark(self, what: object) -> None:
        """Record a wait or a free, which takes no time, among the spans."""
        if self._with_spans:
            self.spans.append((COMPUTE, what, self.now[COMPUTE], self.now[COMPUTE]))

    def wait(self, queue: str, moment_ns: int) -> None:
        """Delay further operations of ``queue`` until ``moment_ns``."""
        if moment_ns > self.now[queue]:
            self.now[queue] = moment_ns

    def path(self) -> tuple[tuple[object, int], ...]:
        """Return the longest path to the end of the compute queue: operations and durations, last first."""
        found = []
        at = getattr(self.now[COMPUTE], "operation", -1)
        while at >= 0:
            what, duration, at = self.operations[at]
            found.append((what, duration))
        return tuple(found)


class Bytes:
    """Bytes alive by term, and their peak."""

    def __init__(self, static_bytes: int) -> None:
        self.terms = {"states": static_bytes}
        self.live = static_bytes
        self.peak = static_bytes
        self.peak_at = "between steps"
        self.peak_terms = dict(self.terms)
        self.at = ""
        self.held: dict[int, int] = {}
        """Activations by module."""
        self.peak_held: dict[int, int] = {}

    def hold(self, module: int, size: int) -> None:
        """Allocate or free activations of a module."""
        if size:
            self.held[module] = self.held.get(module, 0) + size
            self.add("activations", size)

    def add(self, term: str, size: int) -> None:
        """Allocate ``size`` bytes, or free them if negative."""
        self.terms[term] = self.terms.get(term, 0) + size
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_at, self.peak_terms = self.live, self.at, dict(self.terms)
            self.peak_held = dict(self.held)

    def touch(self, term: str, size: int) -> None:
        """Allocate ``size`` bytes and free them again."""
        if self.live + size > self.peak:
            self.add(term, size)
            self.add(term, -size)


IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = range(4)


@dataclass
class State:
    """One unit, between two hooks."""

    unit: Unit
    index: int
    training: int = IDLE
    """State of the hooks."""
    group: int = IDLE
    """State of the parameters."""
    gathered: bool = False
    pending: int | None = None
    """End of its gather, until a queue waits for it."""
    reduced: int | None = None
    """End of its last reduction, until a queue waits for it."""
    held_output: int = 0
    """Bytes of the all-reduced buffer that is held until then."""
    gradient_bytes: int = 0
    accumulated_bytes: int = 0
    """Gradients of earlier micro batches in the reduction's type."""
    partial: bool = False
    has_sharded_gradient: bool = False
    order: list[int] = field(default_factory=list)


@dataclass
class Context:
    """State shared by units: the gather's buffer that is freed late, and reductions in flight."""

    copied_out: tuple[int, int, State] | None = None
    """Moment, bytes, and the unit."""
    reducing: tuple[int, int, State] | None = None
