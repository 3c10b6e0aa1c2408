"""Point-to-point calls of ``torch.distributed`` under virtual clocks.

``isend`` and ``irecv`` are replaced while the context is open, so that every line of Megatron's communication code runs as
it is. A message begins when both sides have posted it and takes its link's time (rendezvous); ``wait`` moves the waiting
rank's clock to its end. Posting costs nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from emulated_device.clock import VirtualClock
from emulated_device.payload import Payload


class EmulatedNetwork:
    """The messages of one rank, from entering the context to leaving it.

    ``store`` hands the posting times to the peer; ``link_ns[v]`` is the time of a message between virtual stages v and
    v + 1 in either direction.
    """

    def __init__(self, clock: VirtualClock, store: Any, link_ns: list[int]) -> None:
        self.clock, self.store, self.link_ns = clock, store, link_ns
        self._posted: Counter[str] = Counter()
        self._works: list[Any] = []
        self._original: dict[str, Any] = {}

    def __enter__(self) -> EmulatedNetwork:
        replaced = {"isend": self._isend, "irecv": self._irecv, "batch_isend_irecv": self._batch}
        for name, function in replaced.items():
            self._original[name] = getattr(dist, name)
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)  # P2POp compares its operation with these
        return self

    def __exit__(self, *exception: object) -> None:
        for name, function in self._original.items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)
        if exception[0] is None:
            # Messages that nobody waits for still have to leave; that costs no time.
            for work in self._works:
                work.finish()

    def link_of(self, data: torch.Tensor) -> int:
        """Nanoseconds that a message takes."""
        return self.link_ns[Payload.read(data).boundary]

    def _isend(self, tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0) -> _Work:
        # A copy: the schedule may free the output as soon as this returns, as it may on an accelerator.
        data = tensor.detach().clone()
        stamp = f"{self.clock.now_ns} {self.link_of(data)}"
        key = self._post(dist.get_rank(), dst, group, "s", stamp)
        return self._keep(_Work(self, self._original["isend"](data, dst, group, tag), data, key, "r"))

    def _irecv(self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> _Work:
        key = self._post(src, dist.get_rank(), group, "r", str(self.clock.now_ns))
        return self._keep(_Work(self, self._original["irecv"](tensor, src, group, tag), tensor, key, "s"))

    def _batch(self, operations: list[Any]) -> list[_Work]:
        return [item.op(item.tensor, item.peer, item.group) for item in operations]

    def _post(self, source: int | None, target: int | None, group: Any, side: str, stamp: str) -> str:
        """Tell the peer when this side was ready; the message's name, equal on both sides as messages keep order."""
        path = f"{source}>{target}/{'world' if group in (None, dist.group.WORLD) else 'pipeline'}"
        number = self._posted[path]
        self._posted[path] += 1
        self.store.set(f"{path}/{number}{side}", stamp)
        return f"{path}/{number}"

    def _keep(self, work: _Work) -> _Work:
        self._works.append(work)
        return work

    def end_of(self, key: str, own: str, other: str) -> int:
        """When both had posted, plus the time of the link, which only the sender knows."""
        stamps = {side: self.store.get(f"{key}{side}").decode().split() for side in (own, other)}
        return max(int(stamp[0]) for stamp in stamps.values()) + int(stamps["s"][1])


class _Work:
    """What ``isend`` and ``irecv`` return."""

    def __init__(self, network: EmulatedNetwork, real: Any, data: torch.Tensor, key: str, other: str) -> None:
        self._network, self._real, self._data, self._key, self._other = network, real, data, key, other
        self._finished = False

    def wait(self, *_: Any) -> bool:
        self.finish()
        network = self._network
        network.clock.reach(network.end_of(self._key, "s" if self._other == "r" else "r", self._other))
        return True

    def finish(self) -> None:
        """The real message is through."""
        if not self._finished:
            self._real.wait()
            self._finished = True
