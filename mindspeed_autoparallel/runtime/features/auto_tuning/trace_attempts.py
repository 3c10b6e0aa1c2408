"""What becomes of points whose tracing process died: a second attempt where the point may not be to blame."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.errors import LaunchError
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.launch import LaunchOutcome, LaunchStatus
from mindspeed_autoparallel.runtime.launch.outcome import worst


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A tracing process that is over."""

    outcome: LaunchOutcome
    at: MeasuredAt | None
    """The point it had taken and not finished; none while the script set itself up."""

    @property
    def looks_like_memory(self) -> bool:
        """Return whether it ran out of memory by its own words, or was killed by the system, which gives no reason."""
        return self.outcome.status is LaunchStatus.OUT_OF_MEMORY or self.outcome.exit_code == -signal.SIGKILL


class Attempts:
    """Rounds of ``num_processes`` tracing processes; halved when memory seems to run short."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.backwards = False
        """Whether points are handed out from the last on: the script sets itself up in the first it is given."""
        self._second: set[MeasuredAt] = set()

    def lost(
        self, ended: Sequence[Ended], left: Collection[MeasuredAt], *, came_forward: bool, starts: bool
    ) -> dict[MeasuredAt, LaunchOutcome]:
        """Return those of the points that a round ``left`` which are not tried again, with what ended their process.

        ``came_forward``: whether the round finished any point. ``starts``: whether the script was traced in any layout,
        so that what ends it before a point is the point's doing.
        """
        dead = [end for end in ended if end.outcome.status is not LaunchStatus.OK]
        if any(end.looks_like_memory for end in dead):
            self.num_processes = max(1, self.num_processes // 2)
        lost = {}
        for end in dead:
            if end.at in left and end.at is not None:
                if end.looks_like_memory and end.at not in self._second:
                    self._second.add(end.at)
                    came_forward = True
                else:
                    lost[end.at] = end.outcome
        if lost or came_forward:
            return lost
        # Nobody came to a point. What hung would take as long to hang again.
        reason = worst([end.outcome for end in dead])
        if reason.is_the_scripts_own and not starts:
            raise LaunchError(f"the script does not start, so nothing can be traced or measured: {reason.describe()}")
        if not self.backwards and reason.status is not LaunchStatus.TIMED_OUT:
            self.backwards = True
            return {}
        return dict.fromkeys(left, reason)
