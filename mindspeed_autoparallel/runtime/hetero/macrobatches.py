"""One encoder's part of a step: its macro-batches in order, with forward, delivery of rows, and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero import pipeline
from mindspeed_autoparallel.runtime.hetero.encode import MacroBatch
from mindspeed_autoparallel.runtime.hetero.output_cache import EncoderOutputCache
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Item
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import make_plan
from mindspeed_autoparallel.runtime.hetero.session import EncoderComm, HeteroSession


@dataclass
class _Window:
    """Consecutive microbatches that are encoded together."""

    microbatches: range
    items: list[Item]
    macro: MacroBatch | None = None


class EncoderStep:
    """All macro-batches of one encoder in one step. Every method is collective, in the same order on every rank.

    ``everyones``: the items of all ranks that exchange with this one. ``k``: index of a macro-batch in the step.
    """

    def __init__(
        self,
        session: HeteroSession,
        comm: EncoderComm,
        batches: Sequence[Any] | None,
        everyones: Sequence[Item],
        num_microbatches: int,
        forward_only: bool,
    ) -> None:
        self._session, self._comm, self._batches = session, comm, batches
        self.encoder = comm.encoder
        self.train = comm.encoder.trainable and not forward_only
        self.outputs = EncoderOutputCache(comm.encoder)
        scale = comm.encoder.scale
        self._windows = [
            _Window(range(first, min(first + scale, num_microbatches)), [])
            for first in range(0, num_microbatches, scale)
        ]
        for item in everyones:
            self._windows[item.microbatch // scale].items.append(item)

    def __len__(self) -> int:
        return len(self._windows)

    def first_microbatch(self, k: int) -> int:
        return self._windows[k].microbatches.start

    def last_microbatch(self, k: int) -> int:
        return self._windows[k].microbatches.stop - 1

    def encode(self, ks: Sequence[int]) -> None:
        """Encode macro-batches, and cache their rows for the model; rows are sent while the next one is computed."""
        if self._comm.num_stages > 1:
            macros = [self._prepare(k) for k in ks]
            with self._encoding():
                for k, macro in zip(ks, macros, strict=True):
                    macro.start_inputs(self._held_inputs(self._windows[k]))
                with self._session.states.computing(self.encoder.name):
                    pipeline.run_forward(self.encoder.config, [macro for macro in macros if not macro.empty])
            for k in ks:
                self._finish(k)
            return
        for place, k in enumerate(ks):
            macro = self._prepare(k)
            with self._encoding():
                macro.start(self._held_inputs(self._windows[k]))
            if place:
                self._finish(ks[place - 1])
        if ks:
            self._finish(ks[-1])

    def take_back(self, ks: Sequence[int]) -> None:
        """Send the gradients of macro-batches to their owners and run the encoder's backward.

        If the encoder does not train, only drop the rows.
        """
        if self._comm.num_stages > 1:
            macros = [self._start_backward(k) for k in ks]
            if self.train:
                with self._encoding("encoder_backward"):
                    with self._session.states.computing(self.encoder.name):
                        pipeline.run_backward(self.encoder.config, [macro for macro in macros if not macro.empty])
                    for macro in macros:
                        macro.forget()
            for k in ks:
                self._windows[k].macro = None
            return
        for place, k in enumerate(ks):
            self._start_backward(k)
            if place:
                self._finish_backward(ks[place - 1])
        if ks:
            self._finish_backward(ks[-1])

    def _prepare(self, k: int) -> MacroBatch:
        """Plan which replica encodes which item, and create the macro-batch."""
        session, comm, window = self._session, self._comm, self._windows[k]
        with session.times.during("planning"):
            plan = make_plan(
                window.items,
                encoder=comm.placement,
                backbone=session.backbone_placement,
                ranks=comm.ranks,
                mode=session.balance,
                sequence_parallel=session.sequence_parallel,
                batch_owner_ranks=session.batch_owner_ranks,
            )
        window.macro = MacroBatch(
            self.encoder,
            plan,
            comm.exchange,
            session.states,
            replica=comm.placement[session.rank].data,
            stage=comm.stage,
            train=self.train,
            keep_graph=session.memory != "recompute",
        )
        return window.macro

    def _finish(self, k: int) -> None:
        """Wait for the rows, and cache them for the model's calls for these microbatches."""
        window = self._windows[k]
        assert window.macro is not None
        with self._encoding():
            rows = window.macro.finish([i for _, indices in self._merged_here(window) for i in indices])
            sizes = [sum(window.items[i].output_rows for i in indices) for _, indices in self._merged_here(window)]
            for (microbatch, _), part in zip(self._merged_here(window), rows.split(sizes), strict=True):
                self.outputs.put(microbatch, part, self.train)

    def _start_backward(self, k: int) -> MacroBatch:
        """Send the gradients of this rank's rows; if the encoder does not train, only drop the rows."""
        window = self._windows[k]
        assert window.macro is not None
        if not self.train:
            for microbatch, _ in self._merged_here(window):
                self.outputs.forget(microbatch)
            return window.macro
        gradients: dict[int, torch.Tensor] = {}
        for microbatch, indices in self._merged_here(window):
            whole = self.outputs.take_gradient(microbatch)
            gradients.update(zip(indices, whole.split([window.items[i].output_rows for i in indices]), strict=True))
        with self._encoding("encoder_backward"):
            window.macro.start_backward(gradients)
        return window.macro

    def _finish_backward(self, k: int) -> None:
        window = self._windows[k]
        if self.train:
            assert window.macro is not None
            reduction = self.encoder.reduction
            overlap = reduction.during(is_last=k == len(self) - 1) if reduction else contextlib.nullcontext()
            with self._encoding("encoder_backward"), overlap:
                window.macro.finish_backward()
        window.macro = None

    def _merged_here(self, window: _Window) -> list[tuple[int, list[int]]]:
        """Return (microbatch, indices of its items) whose rows this rank merges."""
        if not self._session.first_stage:
            return []
        return list(self._own(window))

    def _own(self, window: _Window) -> Iterator[tuple[int, list[int]]]:
        """Yield (microbatch, indices of its items) of this rank's own batches that have items."""
        for microbatch in window.microbatches:
            indices = [
                i
                for i, item in enumerate(window.items)
                if item.dp_replica == self._session.dp_replica and item.microbatch == microbatch
            ]
            if indices:
                yield microbatch, indices

    def _held_inputs(self, window: _Window) -> dict[int, torch.Tensor]:
        """Return the input rows of the items in this rank's own batches, by index."""
        held: dict[int, torch.Tensor] = {}
        if self._batches is None:
            return held
        for microbatch, indices in self._own(window):
            sizes = [window.items[i].input_rows for i in indices]
            rows = self.encoder.adapter.rows(self._batches[microbatch])
            if rows.shape[0] != sum(sizes):
                raise ConfigError(
                    f"microbatch {microbatch} (samples {sorted({window.items[i].sample for i in indices})}) announces "
                    f"{sum(sizes)} input rows and holds {rows.shape[0]}."
                )
            held.update(zip(indices, torch.split(rows, sizes), strict=True))
        return held

    @contextlib.contextmanager
    def _encoding(self, phase: str = "encode") -> Iterator[None]:
        times, before = self._session.times, getattr(self._session.times, phase)
        with self.outputs.suspended(), times.during(phase, self._comm.exchange):
            yield
        self._comm.seconds[phase] += getattr(times, phase) - before
