"""Records of the timeline: what a running module has done so far, and one pass through a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Segment:
    """The part of a pass between two submodules."""

    us: float = 0.0
    transient_bytes: int = 0
    later_bytes: int = 0
    """``transient_bytes`` in a later part of a micro batch, which adds its gradients to existing ones."""
    left_bytes: int = 0
    inside_bytes: int = 0
    """Bytes that the submodule after it leaves."""

    @property
    def made_bytes(self) -> int:
        """Return the part of ``transient_bytes`` that existing gradients save."""
        return max(0, self.transient_bytes - self.later_bytes)


@dataclass
class Frame:
    """A running module."""

    name: str
    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    given: frozenset[int] = frozenset()
    """Addresses of the tensors it was called with, before mixed precision casts them."""
    cast_bytes: int = 0
    """Of the copies that mixed precision makes of these, which the module holds until it returns."""
    saved_bytes: int = 0
    """Of storages that autograd saves while the module runs, without those of ``given``."""
    around_bytes: int = 0
    """What the module around it holds in addition to what was there at that module's start, without saved bytes."""
    is_input_new: bool = False
    """Whether its input is part of that."""

    @property
    def left_bytes(self) -> int:
        """Return the bytes that its segments so far, and the submodules after them, have left."""
        return sum(one.left_bytes + one.inside_bytes for one in self.segments)

    def take(
        self, given: frozenset[int], around: Sequence[Frame], storages: dict[int, int], input_address: int
    ) -> None:
        """Record what it was called with (``given``), the bytes of what it gets by address, and what the innermost
        of ``around`` holds."""
        self.given = given
        self.cast_bytes = sum(size for address, size in storages.items() if address not in given)
        if around:
            self.around_bytes = around[-1].cast_bytes + around[-1].left_bytes - around[-1].saved_bytes
            self.is_input_new = input_address in given and all(input_address not in one.given for one in around)


@dataclass
class Passed:
    """One module in one pass: ``head`` is the part before the end of its last submodule, ``tail`` the part after it."""

    head_us: float = 0.0
    tail_us: float = 0.0
    head_bytes: int = 0
    """Transient bytes: above the level at the end in a forward that saves tensors, else above that at the start."""
    tail_bytes: int = 0
    head_made_bytes: int = 0
    """Part of ``head_bytes``: parameter gradients, which later parts of a micro batch add to the first part's."""
    tail_made_bytes: int = 0
    around_bytes: int = 0
    """``Frame.around_bytes``; in a step whose memory is not tracked, less than 0 by what was saved."""
    is_input_new: bool = False
    num_segments: int = 0

    def add(self, frame: Frame, *, above_start: bool) -> None:
        """Add a pass; ``above_start``: whether its transient bytes count above the level at the module's start."""
        *before, last = frame.segments
        if before:
            self.tail_us += last.us
            start_bytes = frame.cast_bytes + frame.left_bytes - last.left_bytes - last.inside_bytes
            self.tail_bytes = max(self.tail_bytes, last.transient_bytes + start_bytes * above_start)
            self.tail_made_bytes = last.made_bytes
        start_bytes = frame.cast_bytes
        for segment in before or [last]:
            self.head_us += segment.us
            transient_bytes = segment.transient_bytes + start_bytes * above_start
            if transient_bytes >= self.head_bytes:
                self.head_bytes, self.head_made_bytes = transient_bytes, segment.made_bytes
            start_bytes += segment.left_bytes + segment.inside_bytes
        self.around_bytes, self.is_input_new = frame.around_bytes, frame.is_input_new
        self.num_segments = len(frame.segments)
