"""Decides after a failed measuring launch which points to give up, and when to end the search."""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from mindspeed_autoparallel.errors import LaunchError, ProfileError
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchStatus

_NUMBERS = re.compile(r"[0-9]+")
_MOST_SET_UPS = 3
_FULL_DISK = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


class Attempts:
    """Decides whether a point, a layout or the set-up is at fault.

    A layout is a point without its microbatch size.
    """

    def __init__(self, points: Sequence[MeasuredAt]) -> None:
        self._first = 0
        self._errors: list[str] = []
        """Errors of consecutive launches that failed before their first point."""
        self._num_failures = dict.fromkeys(points, 0)
        self._met: defaultdict[str, list[MeasuredAt]] = defaultdict(list)
        """Points at which the script failed by its own error, by the error's text."""

    def order(self, missing: list[MeasuredAt]) -> list[MeasuredAt]:
        """Return ``missing`` by failures of the layout, then of the point; a failed set-up puts another point first."""
        turn = self._first % len(missing) if missing else 0
        of_layout: dict[MeasuredAt, int] = defaultdict(int)
        for point, count in self._num_failures.items():
            of_layout[_layout(point)] += count
        turned = missing[turn:] + missing[:turn]
        return sorted(turned, key=lambda point: (of_layout[_layout(point)], self._num_failures[point]))

    def failed(
        self,
        outcome: LaunchOutcome,
        begun: MeasuredAt | None,
        unfinished: list[MeasuredAt],
        *,
        none_measured: bool = False,
    ) -> list[MeasuredAt]:
        """Return the points to give up; ``ProfileError`` if the launch would fail at any point.

        ``begun``: the point that was running. It is retried once, unless its result reports out of memory. If it has
        one sample per microbatch, its layout is not measured further. ``LaunchError`` if the disk is full.
        """
        full = next((line.strip() for line in outcome.last_lines if any(sign in line for sign in _FULL_DISK)), None)
        if full is not None:
            raise LaunchError(f"{full}. Free space there and start the same command again: what is measured is kept.")
        no_room = outcome.status is LaunchStatus.OUT_OF_MEMORY
        error = _NUMBERS.sub("#", outcome.last_lines[-1] if outcome.last_lines else "")
        if begun is not None:
            self._errors, self._num_failures[begun] = [], self._num_failures[begun] + 1
            gone = {begun} if (no_room and begun not in unfinished) or self._num_failures[begun] > 1 else set()
            if outcome.is_the_scripts_own:
                gone |= self._same_elsewhere(begun, error, outcome, none_measured=none_measured)
            return [point for point in unfinished if point in gone or _layout(point) in gone]
        if no_room:
            return unfinished[:1]
        again = self._errors and (error == self._errors[-1] or len(self._errors) >= _MOST_SET_UPS)
        if again or outcome.is_the_scripts_own:
            times = f", {len(self._errors) + 1} times now" if again else ""
            raise ProfileError(
                f"the script ends before the first layout is measured{times}; fix the script and start again: "
                f"{outcome.summary()}"
            )
        self._errors.append(error)
        self._first += 1
        return []

    def _same_elsewhere(
        self, point: MeasuredAt, error: str, outcome: LaunchOutcome, *, none_measured: bool
    ) -> set[MeasuredAt]:
        """Return the layouts of all points that failed with ``error``; none until a second point does.

        ``ProfileError`` if no point has been measured by then.
        """
        before = self._met[error]
        other = next((earlier for earlier in before if earlier != point), None)
        before.append(point)
        if other is None:
            return set()
        if none_measured:
            raise ProfileError(
                f"the script fails in the first microbatch of both {other.label()} and {point.label()}, so no layout "
                f"will work. Fix it and start again: {outcome.summary()}"
            )
        return {_layout(met) for met in before}


def _layout(point: MeasuredAt) -> MeasuredAt:
    return replace(point, micro_batch_size=1)
