"""How the host's interleaved schedule sends: settings, and the behaviour of this release of Megatron."""

from __future__ import annotations

import inspect
from typing import Any

_WAIT = "send_next_wait_handle.wait()"
_WAITS_WITHOUT_FREEING = 2


def interleaved_sends(arguments: Any) -> str:
    """Return one of ``schedule.SENDS`` for parsed (not yet validated) arguments: validation turns overlap off without
    VPP."""
    if not getattr(arguments, "overlap_p2p_comm", True):
        return "blocking"
    frees = _waits_before_freeing()
    if getattr(arguments, "overlap_p2p_comm_warmup_flush", False):
        return "flushed-freed" if frees else "flushed"
    return "freed" if frees else "overlapped"


def _waits_before_freeing() -> bool:
    """Return whether the schedule waits for a forward's send before it frees the output; no version number shows it.

    All releases wait for the previous send once in warm-up and once in the steady phase; safe ones wait more often.
    """
    from megatron.core.pipeline_parallel import schedules

    function = inspect.unwrap(schedules.forward_backward_pipelining_with_interleaving)
    try:
        return inspect.getsource(function).count(_WAIT) > _WAITS_WITHOUT_FREEING
    except (OSError, TypeError):
        return True
