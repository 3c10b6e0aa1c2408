"""Replay of one step under torch's ``fully_shard``: gathers, frees, reductions and host copies that overlap computing.

The replay runs the rules of torch's own hooks over a tree of modules. Queues are in order and the host is never late,
so one pass in program order gives every start and end; memory follows program order, as a stream-ordered allocator's
does.
"""

from mindspeed_autoparallel.schedule.sharded.replay import Replayed, replay
from mindspeed_autoparallel.schedule.sharded.training import StreamModule, StreamTraining, Unit

__all__ = ["Replayed", "StreamModule", "StreamTraining", "Unit", "replay"]
