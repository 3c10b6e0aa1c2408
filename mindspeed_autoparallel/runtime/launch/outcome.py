"""Specification and outcome of a launch."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

_REFUSED = "in validate_args"
"""Sign of Megatron's checks of its flags."""
_NOT_THE_SCRIPTS = (_REFUSED, "Address already in use", "Connection", "Broken pipe", "ChildFailedError")
"""Signs of errors that are not the script's own: Megatron's checks, which another layout may pass, or lost peers."""

_MOST_LINES = 30


class LaunchStatus(str, enum.Enum):
    """Status of a launch after its end, by severity: out of memory causes failures on other nodes."""

    OK = "ok"
    NOT_STARTED = "not_started"
    """A required node was gone before the launch began."""
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One launch, the same on every node."""

    launch_id: str
    """Unique within the work dir; names the log files."""
    argv: tuple[str, ...]
    """The user's script and its arguments, without the interpreter."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the user's environment for the children."""
    task: dict[str, object] = field(default_factory=dict)
    """Task passed to every child as a JSON file."""
    timeout_s: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """Outcome of a launch on one node, or the worst of all nodes."""

    status: LaunchStatus
    node_rank: int = 0
    exit_code: int = 0
    last_lines: tuple[str, ...] = ()
    """The end of the first failed process's output."""
    log: str = ""
    """The file with the whole output."""
    seconds: float = 0.0

    @property
    def is_the_scripts_own(self) -> bool:
        """Return whether the script failed by its own error: no crash, no lost peer, no layout that Megatron
        refuses."""
        return self._failed_by_itself and not self._shows(*_NOT_THE_SCRIPTS)

    @property
    def is_refused(self) -> bool:
        """Return whether Megatron refused the flags."""
        return self._failed_by_itself and self._shows(_REFUSED)

    @property
    def _failed_by_itself(self) -> bool:
        return self.status is LaunchStatus.FAILED and self.exit_code > 0

    def _shows(self, *signs: str) -> bool:
        return any(sign in line for line in self.last_lines for sign in signs)

    def summary(self) -> str:
        """Return one line for users: status, node, exit code or signal, and the last line."""
        last = (line.strip() for line in self.last_lines[-1:])
        return ": ".join([self._head(), *last])

    def describe(self, *, log_is_kept: bool = True) -> str:
        """Return ``summary``, the last lines, and the log's path unless the log is temporary.

        At most 30 lines are shown, the last ones: the cause is in these and in the summary.
        """
        lines = self.last_lines if len(self.last_lines) > 1 else ()
        if len(lines) > _MOST_LINES:
            lines = (f"({len(lines) - _MOST_LINES} lines before)", *lines[-_MOST_LINES:])
        where = [f"(the whole log is {self.log})"] if self.log and log_is_kept else []
        return "\n".join([self.summary(), *(f"    {line}" for line in (*lines, *where))])

    def _head(self) -> str:
        if self.status is LaunchStatus.NOT_STARTED:
            return "not started"
        head = f"{self.status.value.replace('_', ' ')} on node {self.node_rank} after {self.seconds:.0f} s"
        if self.status is LaunchStatus.OK:
            return head
        if self.exit_code < -1:
            return f"{head}, ended by signal {-self.exit_code} ({signal.strsignal(-self.exit_code)})"
        return f"{head}, exit code {self.exit_code}"


def worst(outcomes: list[LaunchOutcome]) -> LaunchOutcome:
    """Return the most severe outcome."""
    return max(outcomes, key=lambda outcome: list(LaunchStatus).index(outcome.status))
