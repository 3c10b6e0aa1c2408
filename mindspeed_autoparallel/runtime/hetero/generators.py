"""A generator's part of a step: it receives the decoder's rows and returns losses and the gradients of the rows.

It runs between the last stage's forward and backward of each microbatch, on all ranks. The model calls it as usual,
and the call returns losses of zero. The rows are exchanged in the backward of these losses, to which the stock schedule
and the host's loss function apply their scale, so gradients are exact for any host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.hetero.batches import StepBatches
from mindspeed_autoparallel.runtime.hetero.exchange import Arrived
from mindspeed_autoparallel.runtime.hetero.generator_work import (
    GeneratorPlans,
    GeneratorWork,
    GivenRows,
    Places,
    places_of_rank,
)
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Item
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import MeetingStages, RedistributionPlan, make_plan
from mindspeed_autoparallel.runtime.hetero.session import EncoderComm, HeteroSession


@dataclass
class GeneratorStep:
    """All microbatches of one generator in one step; ``exchange`` is collective, in the same order on every rank.

    ``everyones``: the items of all ranks that exchange with this one.
    """

    session: HeteroSession
    comm: EncoderComm
    batches: StepBatches | None
    """This rank's batches; each is released once its targets are read."""
    everyones: Sequence[Item]
    num_microbatches: int
    forward_only: bool
    current: int = -1
    """The last stage's current microbatch."""
    done: int = 0
    """Number of microbatches exchanged."""
    reports: list[torch.Tensor] = field(default_factory=list)
    """On the last stage: per microbatch the sum of the losses and their number."""
    original: Any = None
    """The module's own forward."""
    _called: int = -1
    _rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.original = self.comm.encoder.module.forward

    @property
    def name(self) -> str:
        return self.comm.encoder.name

    def answering(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that replaces the model's calls of the generator."""
        return replaced(self.comm.encoder.module, "forward", self._answer)

    def _answer(self, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return losses of zero ``[rows]`` for ``rows [rows, *output_shape]`` of the decoder."""
        self._called = self.current
        if self.forward_only:
            self._rows = rows
            return rows.new_zeros(rows.shape[0], dtype=torch.float32)
        # With a frozen decoder, some tensor must still require a gradient.
        root = torch.zeros((), device=rows.device, requires_grad=True)
        losses: torch.Tensor = _Losses.apply(rows, root, self, self.current)  # type: ignore[no-untyped-call]
        return losses

    def after_forward(self) -> None:
        """Check on the last stage that the model called the generator; in a forward-only step, exchange at once."""
        if self._called == self.current and not self.forward_only:
            return
        rows = self._rows
        if rows is None:
            own = [item for item in self._items(self.current) if item.dp_replica == self.session.dp_replica]
            if own:
                raise ConfigError(
                    f"the model never called {self.name} for microbatch {self.current}, which has {len(own)} items for "
                    "it. The forward step must call the generator wherever the batch has rows for it."
                )
            adapter = self.comm.encoder.adapter
            device = next(self.comm.encoder.module.parameters()).device
            rows = torch.zeros((0, *adapter.output_shape), dtype=adapter.output_dtype, device=device)
        self._rows = None
        weights = None if self.forward_only else rows.new_zeros(0, dtype=torch.float32)
        self.exchange(self.current, GivenRows(rows, weights))

    def check_done(self, count: int) -> None:
        """Raise ``ConfigError`` if the loss function left the generator's losses out: their backward then never ran."""
        if self.done != count:
            raise ConfigError(
                f"the loss of microbatch {self.done} does not depend on what {self.name} returned. The loss function "
                "must add the generator's losses, with their weight, to the sum it returns."
            )

    def exchange(self, microbatch: int, given: GivenRows | None) -> torch.Tensor | None:
        """Send rows to their owners, run the generator there, and return the gradient of ``given.rows``.

        ``given``: ``None`` on ranks outside the last stage, which get ``None``.
        """
        with self.session.times.during("generate", self.comm.exchange):
            gradient = self._exchange(microbatch, given)
        self.done = microbatch + 1
        return gradient

    def _exchange(self, microbatch: int, given: GivenRows | None) -> torch.Tensor | None:
        items = self._items(microbatch)
        plans = self._plans(items)
        places = places_of_rank(plans.rows.outputs, self.session.rank)
        if given is not None:
            expected = sum(stop - start for start, stop in places.values())
            if given.rows.shape[0] != expected:
                raise ConfigError(
                    f"{self.name}: microbatch {microbatch} has {expected} rows for it on rank {self.session.rank}, but "
                    f"the model gave {given.rows.shape[0]}. Give the rows of the items in the order of the batch."
                )
        if not items:
            return self._finish(given, [], [], {})
        work = GeneratorWork(
            self.session, self.comm, plans, items, original=self.original, trains=not self.forward_only
        )
        work.start(self._held_targets(microbatch, items), given, places)
        losses, gradients = work.compute()
        back = None
        if gradients is not None:
            back = work.transfer(plans.rows.outputs, functools.partial(work.cut, gradients), "gradients")
        told = work.transfer(plans.losses.outputs, functools.partial(work.cut, losses), "outputs", scalar=True)
        arrived = back.finish() if back is not None else []
        return self._finish(given, arrived, told.finish(), places)

    def _finish(
        self, given: GivenRows | None, gradients: Arrived, losses: Arrived, places: Places
    ) -> torch.Tensor | None:
        """Record the losses and return the gradient of the rows, on ranks of the last stage."""
        if given is None:
            return None
        device = given.rows.device
        total = torch.zeros((), device=device)
        for _, values in losses:
            total = total + values.sum()
        count = float(sum(piece.stop - piece.start for piece, _ in losses))
        self.reports.append(torch.stack((total, torch.tensor(count, device=device))))
        if given.weights is None:
            return None
        result = torch.zeros_like(given.rows)
        for piece, rows in gradients:
            start, stop = places[piece.item, piece.start]
            result[start:stop] = rows
        return result

    def _items(self, microbatch: int) -> list[Item]:
        return [item for item in self.everyones if item.microbatch == microbatch]

    def _plans(self, items: Sequence[Item]) -> GeneratorPlans:
        session, comm = self.session, self.comm
        last = comm.num_stages - 1

        def plan(sequence_parallel: bool, gives: int) -> RedistributionPlan:
            return make_plan(
                items,
                encoder=comm.placement,
                backbone=session.backbone_placement,
                ranks=comm.ranks,
                mode=session.balance,
                sequence_parallel=sequence_parallel,
                batch_owner_ranks=session.batch_owner_ranks,
                stages=MeetingStages(backbone=session.num_stages - 1, takes=last, gives=gives),
            )

        rows = plan(session.sequence_parallel, 0)
        weights = plan(session.sequence_parallel, last) if last else rows
        # Every rank of a tensor group reports all losses.
        return GeneratorPlans(rows, weights, plan(False, last) if session.sequence_parallel else weights)

    def _held_targets(self, microbatch: int, items: Sequence[Item]) -> dict[int, torch.Tensor]:
        """Return target rows of the items in this rank's own batches, by index."""
        own = [i for i, item in enumerate(items) if item.dp_replica == self.session.dp_replica]
        batch = None if self.batches is None else self.batches.take(microbatch)
        if batch is None or not own:
            return {}
        rows = self.comm.encoder.adapter.rows(batch)
        return dict(zip(own, torch.split(rows, [items[i].input_rows for i in own]), strict=True))


class _Losses(torch.autograd.Function):
    """Losses of zero; their backward runs the generator and returns the gradient of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, root: torch.Tensor, step: GeneratorStep, microbatch: int) -> torch.Tensor:
        ctx.step, ctx.microbatch, ctx.rows = step, microbatch, rows.detach()
        return rows.new_zeros(rows.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        given = GivenRows(ctx.rows, gradients[0])
        ctx.rows = None
        return ctx.step.exchange(ctx.microbatch, given), None, None, None
