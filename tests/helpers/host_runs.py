"""How a job of a host ended."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The worst exit code of a job's processes, and what all of them printed."""

    exit_code: int
    output: str
    seconds: float

    @property
    def losses(self) -> list[float]:
        """Losses that the training logged, one per iteration; of multi-token prediction the main one, which comes first."""
        found = re.findall(r"iteration +(\d+)/.*? (?:lm )?loss: ([-+.E0-9]+) ", self.output)
        return list({int(iteration): float(loss) for iteration, loss in found}.values())
