"""The log line that a hetero-parallel job adds to the host's: time of each phase, bytes moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.runtime.hetero.job import current_job
from mindspeed_autoparallel.runtime.hetero.session import HeteroSession
from mindspeed_autoparallel.units import MIB


def log(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``training_log``: the last rank prints one more line at every log interval."""
    job = current_job()
    result = wrapped(*args, **kwargs)
    session = job.session
    if session is None:
        return result
    iteration = inspect.signature(wrapped).bind(*args, **kwargs).arguments["iteration"]
    interval = int(job.arguments.log_interval)
    if iteration % interval == 0:
        text = summary(session, interval)
        session.times.reset()
        for comm in session.comms:
            comm.exchange.moved.reset()
            comm.seconds = dict.fromkeys(comm.seconds, 0.0)
        # This rank prints the host's own line, too.
        if session.rank == len(session.backbone_placement) - 1:
            print(text, flush=True)
    return result


def summary(session: HeteroSession, num_steps: int) -> str:
    """Return one line: mean milliseconds per step of this rank's phases and encoders, and the MiB it received."""

    def milliseconds(seconds: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {value / num_steps * 1e3:.1f}" for name, value in seconds.items())

    encoders = "; ".join(f"{comm.encoder.name} {milliseconds(comm.seconds)}" for comm in session.encoder_comms)
    moved = "; ".join(
        f"{comm.encoder.name} "
        + ", ".join(f"{kind} {size / num_steps / MIB:.3f}" for kind, size in vars(comm.exchange.moved).items())
        for comm in session.comms
    )
    times = milliseconds(vars(session.times))
    return f" hetero ms per step on rank {session.rank}: {times} | {encoders} | received MiB per step: {moved}"
