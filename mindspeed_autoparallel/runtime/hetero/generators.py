"""A generator's part of a step: the decoder's rows go to it, its losses and the gradients of the rows come back.

It works between the last stage's forward and backward of each microbatch, on all ranks. The model calls it as always;
the call answers with losses of zero, and their backward, which the stock schedule runs with whatever scale it and the
host's loss function gave them, is the moment at which the rows travel: scale and gradients are exact for any host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.exchange import Arrived
from mindspeed_autoparallel.runtime.hetero.output_cache import replaced_forward
from mindspeed_autoparallel.runtime.hetero.redistribution.items import Item
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece, RedistributionPlan, make_plan
from mindspeed_autoparallel.runtime.hetero.session import EncoderComm, HeteroSession


@dataclass
class _Given:
    """What the model gave for one microbatch on a rank of the last stage."""

    rows: torch.Tensor
    weights: torch.Tensor | None = None
    """Gradient of the step's loss with respect to each row's loss; ``None`` when nothing is trained."""


@dataclass
class GeneratorStep:
    """All microbatches of one generator in one step; ``exchange`` is collective, in the same order on every rank.

    ``everyones``: the items of all ranks that exchange with this one.
    """

    session: HeteroSession
    comm: EncoderComm
    batches: Sequence[Any] | None
    everyones: Sequence[Item]
    num_microbatches: int
    forward_only: bool
    current: int = -1
    """The microbatch that the last stage is at."""
    done: int = 0
    """Microbatches that were exchanged."""
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

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Answer the model's calls of the generator inside the block."""
        with replaced_forward(self.comm.encoder.module, self._answer):
            yield

    def _answer(self, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return losses of zero ``[rows]`` for ``rows [rows, *output_shape]`` of the decoder."""
        self._called = self.current
        if self.forward_only:
            self._rows = rows
            return rows.new_zeros(rows.shape[0], dtype=torch.float32)
        # Behind a frozen decoder something must still ask for a gradient.
        root = torch.zeros((), device=rows.device, requires_grad=True)
        losses: torch.Tensor = _Losses.apply(rows, root, self, self.current)  # type: ignore[no-untyped-call]
        return losses

    def after_forward(self) -> None:
        """Look on the last stage whether the model called the generator; without training, exchange at once."""
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
        self.exchange(self.current, _Given(rows, weights))

    def check_done(self, count: int) -> None:
        """Raise where the loss function left the generator's losses out: its backward would never have come."""
        if self.done != count:
            raise ConfigError(
                f"the loss of microbatch {self.done} does not depend on what {self.name} returned. The loss function "
                "must add the generator's losses, with their weight, to the sum it returns."
            )

    def exchange(self, microbatch: int, given: _Given | None) -> torch.Tensor | None:
        """Bring rows to their owners, run the generator there, and return the gradient of ``given.rows``.

        ``given``: ``None`` on ranks that are not of the last stage.
        """
        with self.session.times.during("generate", self.comm.exchange):
            gradient = self._exchange(microbatch, given)
        self.done = microbatch + 1
        return gradient

    def _exchange(self, microbatch: int, given: _Given | None) -> torch.Tensor | None:
        items = self._items(microbatch)
        plan, whole = self._plans(items)
        places = _places(plan.outputs, self.session.rank)
        if given is not None:
            expected = sum(stop - start for start, stop in places.values())
            if given.rows.shape[0] != expected:
                raise ConfigError(
                    f"{self.name}: microbatch {microbatch} has {expected} rows for it on rank {self.session.rank}, but "
                    f"the model gave {given.rows.shape[0]}. Give the rows of the items in the order of the batch."
                )
        if not items:
            return self._finish(given, [], [], {})
        work = _Work(self, plan, items)
        work.start(self._held_targets(microbatch, items), given, places)
        losses, gradients = work.compute()
        back = self._send(plan.outputs, gradients, work, "gradients") if gradients is not None else None
        told = work.transfer(whole.outputs, lambda piece: work.cut(losses, piece), "outputs", scalar=True)
        arrived = back.finish() if back is not None else []
        return self._finish(given, arrived, told.finish(), places)

    def _send(self, pieces: Sequence[Piece], rows: torch.Tensor, work: _Work, kind: str) -> Any:
        return work.transfer(pieces, lambda piece: work.cut(rows, piece), kind)

    def _finish(
        self, given: _Given | None, gradients: Arrived, losses: Arrived, places: dict[tuple[int, int], tuple[int, int]]
    ) -> torch.Tensor | None:
        """Note the losses, and return the gradient of the rows on ranks of the last stage."""
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

    def _plans(self, items: Sequence[Item]) -> tuple[RedistributionPlan, RedistributionPlan]:
        """Return the plan of the rows, and that of the losses: every rank of a tensor group reports all of them."""
        session, comm = self.session, self.comm

        def plan(sequence_parallel: bool) -> RedistributionPlan:
            return make_plan(
                items,
                encoder=comm.placement,
                backbone=session.backbone_placement,
                ranks=comm.ranks,
                mode=session.balance,
                sequence_parallel=sequence_parallel,
                stage=session.num_stages - 1,
                batch_owner_ranks=session.batch_owner_ranks,
            )

        rows = plan(session.sequence_parallel)
        return rows, plan(False) if session.sequence_parallel else rows

    def _held_targets(self, microbatch: int, items: Sequence[Item]) -> dict[int, torch.Tensor]:
        """Return target rows of the items in this rank's own batches, by index."""
        own = [i for i, item in enumerate(items) if item.dp_replica == self.session.dp_replica]
        if self.batches is None or not own:
            return {}
        rows = self.comm.encoder.adapter.rows(self.batches[microbatch])
        return dict(zip(own, torch.split(rows, [items[i].input_rows for i in own]), strict=True))


class _Work:
    """One microbatch on one rank: what arrives for the items this rank's replica owns, and what it computes."""

    def __init__(self, step: GeneratorStep, plan: RedistributionPlan, items: Sequence[Item]) -> None:
        self._step, self._plan, self._items = step, plan, items
        self._module = step.comm.encoder.module
        self._adapter: Any = step.comm.encoder.adapter
        self._mine = plan.owned_by(step.comm.placement[step.session.rank].data)
        self._first: dict[int, int] = {}
        self._num_rows = 0
        for item in self._mine:
            self._first[item] = self._num_rows
            self._num_rows += items[item].output_rows
        self._device = next(self._module.parameters()).device
        self._targets: list[torch.Tensor] = []
        self._rows: torch.Tensor = torch.empty(0)
        self._weights: torch.Tensor | None = None

    def transfer(self, pieces: Sequence[Piece], rows_of: Any, kind: str, *, scalar: bool = False) -> Any:
        """Send rows as the decoder has them, or (``scalar``) one fp32 number for each."""
        shape = () if scalar else self._adapter.output_shape
        dtype = torch.float32 if scalar else self._adapter.output_dtype
        return self._step.comm.exchange.start(
            pieces, rows_of, row_shape=shape, dtype=dtype, device=self._device, kind=kind
        )

    def cut(self, rows: torch.Tensor, piece: Piece) -> torch.Tensor:
        first = self._first[piece.item]
        return rows[first + piece.start : first + piece.stop]

    def start(
        self,
        targets: dict[int, torch.Tensor],
        given: _Given | None,
        places: dict[tuple[int, int], tuple[int, int]],
    ) -> None:
        """Bring targets, rows and weights to their owners."""
        adapter, plan = self._adapter, self._plan

        def held(values: torch.Tensor, piece: Piece) -> torch.Tensor:
            start, stop = places[piece.item, piece.start]
            return values[start:stop]

        arriving = self._step.comm.exchange.start(
            plan.inputs,
            lambda piece: targets[piece.item][piece.start : piece.stop],
            row_shape=adapter.input_shape,
            dtype=adapter.input_dtype,
            device=self._device,
            kind="inputs",
        )
        rows = self.transfer(plan.gradients, lambda piece: held(_rows(given), piece), "inputs")
        train = not self._step.forward_only
        weights = (
            self.transfer(plan.gradients, lambda piece: held(_weights(given), piece), "inputs", scalar=True)
            if train
            else None
        )
        self._targets = [values for _, values in sorted(arriving.finish(), key=lambda pair: pair[0].item)]
        self._rows = self._placed(rows.finish(), adapter.output_shape, adapter.output_dtype)
        self._weights = self._placed(weights.finish(), (), torch.float32) if weights is not None else None

    def compute(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of this replica's rows and, where it trains, the rows' gradients."""
        session, name, adapter = self._step.session, self._step.name, self._adapter
        items: Sequence[Any] = [self._items[i] for i in self._mine]
        rows, targets, weights = self._rows, self._targets, self._weights
        if not items:
            # Nobody waits for a dummy's losses: they weigh nothing, but all collectives are issued.
            rows, own_targets, items = adapter.dummy()
            weights = None if weights is None else torch.zeros(rows.shape[0], device=self._device)
            targets = [own_targets]
        original = replaced_forward(self._module, self._step.original)
        with session.states.use(name), session.states.drawing(name), original, torch.enable_grad():
            if weights is None:
                with torch.no_grad():
                    return adapter.generate(self._module, rows, torch.cat(targets), items), None
            leaf = rows.detach().requires_grad_(True)
            losses = adapter.generate(self._module, leaf, torch.cat(targets), items)
            torch.autograd.backward((losses * weights).sum())
        assert leaf.grad is not None
        return losses.detach(), leaf.grad

    def _placed(self, arrived: Arrived, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        rows = torch.zeros((self._num_rows, *shape), dtype=dtype, device=self._device)
        for piece, values in arrived:
            self.cut(rows, piece).copy_(values)
        return rows


class _Losses(torch.autograd.Function):
    """Losses of zero; their backward runs the generator and gives the gradient of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, root: torch.Tensor, step: GeneratorStep, microbatch: int) -> torch.Tensor:
        ctx.step, ctx.microbatch, ctx.rows = step, microbatch, rows.detach()
        return rows.new_zeros(rows.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        given = _Given(ctx.rows, gradients[0])
        ctx.rows = None
        return ctx.step.exchange(ctx.microbatch, given), None, None, None


def _places(pieces: Sequence[Piece], rank: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return where runs of items lie among the rows that ``rank`` keeps, by (item, first row of the run)."""
    places, start = {}, 0
    for piece in sorted((p for p in pieces if p.target == rank), key=lambda p: (p.item, p.start)):
        places[piece.item, piece.start] = (start, start + piece.stop - piece.start)
        start += piece.stop - piece.start
    return places


def _rows(given: _Given | None) -> torch.Tensor:
    assert given is not None, "rows come from the last stage"
    return given.rows


def _weights(given: _Given | None) -> torch.Tensor:
    assert given is not None and given.weights is not None
    return given.weights
