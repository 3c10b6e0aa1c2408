"""A generator's computation for one microbatch on one rank, from received rows to returned losses and gradients.

A generator with its own pipeline runs the stock 1F1B schedule over the items that its replica owns, one item per
microbatch, forward and backward within the one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.hetero.exchange import Arrived, Transfer
from mindspeed_autoparallel.runtime.hetero.pipeline import run_backward, run_forward
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Item
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece, RedistributionPlan
from mindspeed_autoparallel.runtime.hetero.session import EncoderComm, HeteroSession

Places = Mapping[tuple[int, int], tuple[int, int]]
"""Positions of runs of items in the rows that a rank keeps, by (item, first row of the run)."""


@dataclass
class GivenRows:
    """The model's rows for one microbatch on a rank of the last stage."""

    rows: torch.Tensor
    weights: torch.Tensor | None = None
    """Gradient of the step's loss with respect to each row's loss; ``None`` when nothing is trained."""


class ItemOnStage:
    """One item on one stage of a generator's own pipeline (a ``StageBatch``).

    ``rows``: the decoder's, input of the first stage; ``targets`` (``None`` before the last stage) and ``weights``,
    the gradient of each row's loss, are the last stage's.
    """

    def __init__(
        self,
        module: Any,
        adapter: Any,
        items: Sequence[Any],
        *,
        rows: torch.Tensor,
        targets: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> None:
        self._module, self._adapter, self._items = module, adapter, items
        self._rows, self._targets, self._weights = rows, targets, weights
        self._leaf: torch.Tensor | None = None
        self.output: torch.Tensor = torch.empty(0)
        """The stage's output; on the last stage the losses."""

    @property
    def arriving_shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._adapter.arriving_shape(self._module, self._items)
        return shape

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient of the stage's input, after its backward."""
        assert self._leaf is not None and self._leaf.grad is not None
        return self._leaf.grad

    def advance(self, received: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            self.output = self._forward(received, self._rows if received is None else received)
        return self.output

    def graph(self, received: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        self._leaf = (self._rows if received is None else received).detach().requires_grad_(True)
        output = self._forward(received, self._leaf)
        self.output = output.detach()
        # The first stage has no previous stage to send its leaf's gradient to.
        return None if received is None else self._leaf, output

    def output_gradient(self, output: torch.Tensor) -> torch.Tensor:
        assert self._weights is not None
        return self._weights

    def _forward(self, received: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        run = self._adapter.generate if received is None else self._adapter.generate_later_stage
        output: torch.Tensor = run(self._module, rows, self._targets, self._items)
        return output


@dataclass(frozen=True)
class GeneratorPlans:
    """Transfers of one microbatch. Targets go to the last stage of the generator's own pipeline."""

    rows: RedistributionPlan
    """Rows to the first stage; their gradients come back from there."""
    weights: RedistributionPlan
    """Weights of the losses to the last stage."""
    losses: RedistributionPlan
    """Losses from the last stage."""


class GeneratorWork:
    """One microbatch on one rank: the received rows of the items that its replica owns, and their computation."""

    def __init__(
        self,
        session: HeteroSession,
        comm: EncoderComm,
        plans: GeneratorPlans,
        items: Sequence[Item],
        *,
        original: Callable[..., Any],
        trains: bool,
    ) -> None:
        """Set up one microbatch; ``original``: the module's own forward, whose calls may be replaced at present."""
        self._session, self._comm, self._plans, self._items = session, comm, plans, items
        self._original, self._trains = original, trains
        self._module = comm.encoder.module
        self._adapter: Any = comm.encoder.adapter
        self._mine = plans.rows.owned_by(comm.placement[session.rank].data)
        self._first: dict[int, int] = {}
        self._num_rows = 0
        for item in self._mine:
            self._first[item] = self._num_rows
            self._num_rows += items[item].output_rows
        self._device = next(self._module.parameters()).device
        self._targets: list[torch.Tensor] = []
        self._rows: torch.Tensor = torch.empty(0)
        self._weights: torch.Tensor | None = None

    def transfer(
        self, pieces: Sequence[Piece], rows_of: Callable[[Piece], torch.Tensor], kind: str, *, scalar: bool = False
    ) -> Transfer:
        """Send rows as the decoder outputs them, or (``scalar``) one fp32 number for each."""
        shape = () if scalar else self._adapter.output_shape
        dtype = torch.float32 if scalar else self._adapter.output_dtype
        return self._comm.exchange.start(pieces, rows_of, row_shape=shape, dtype=dtype, device=self._device, kind=kind)

    def cut(self, rows: torch.Tensor, piece: Piece) -> torch.Tensor:
        first = self._first[piece.item]
        return rows[first + piece.start : first + piece.stop]

    def start(self, targets: dict[int, torch.Tensor], given: GivenRows | None, places: Places) -> None:
        """Send targets, rows and weights to their owners."""
        adapter, plans = self._adapter, self._plans

        def held(values: torch.Tensor, piece: Piece) -> torch.Tensor:
            start, stop = places[piece.item, piece.start]
            return values[start:stop]

        arriving = self._comm.exchange.start(
            plans.rows.inputs,
            lambda piece: targets[piece.item][piece.start : piece.stop],
            row_shape=adapter.input_shape,
            dtype=adapter.input_dtype,
            device=self._device,
            kind="inputs",
        )
        rows = self.transfer(plans.rows.gradients, lambda piece: held(_rows(given), piece), "inputs")
        weights = (
            self.transfer(plans.weights.gradients, lambda piece: held(_weights(given), piece), "inputs", scalar=True)
            if self._trains
            else None
        )
        self._targets = [values for _, values in sorted(arriving.finish(), key=lambda pair: pair[0].item)]
        self._rows = self._placed(rows.finish(), adapter.output_shape, adapter.output_dtype)
        self._weights = self._placed(weights.finish(), (), torch.float32) if weights is not None else None

    def compute(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of this replica's rows and, in training, the rows' gradients.

        With its own pipeline the last stage returns the losses and the first the gradients; other results are empty.
        """
        if self._comm.num_stages > 1:
            return self._compute_in_stages()
        session, name, adapter = self._session, self._comm.encoder.name, self._adapter
        items: Sequence[Any] = [self._items[i] for i in self._mine]
        rows, targets, weights = self._rows, self._targets, self._weights
        if not items:
            # A dummy's losses have weight 0 and no reader; it runs because every rank must issue all collectives.
            rows, own_targets, items = adapter.dummy()
            weights = None if weights is None else torch.zeros(rows.shape[0], device=self._device)
            targets = [own_targets]
        original = replaced(self._module, "forward", self._original)
        with session.states.computing(name), original, torch.enable_grad():
            if weights is None:
                with torch.no_grad():
                    return adapter.generate(self._module, rows, torch.cat(targets), items), None
            leaf = rows.detach().requires_grad_(True)
            losses = adapter.generate(self._module, leaf, torch.cat(targets), items)
            torch.autograd.backward((losses * weights).sum())
        assert leaf.grad is not None
        return losses.detach(), leaf.grad

    def _compute_in_stages(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        session, name = self._session, self._comm.encoder.name
        batches = [self._batch(number, item) for number, item in enumerate(self._mine)] or [self._dummy_batch()]
        run = run_forward if self._weights is None else run_backward
        original = replaced(self._module, "forward", self._original)
        with session.states.computing(name), original:
            run(self._comm.encoder.config, batches)
        losses = gradients = torch.empty(0)
        if self._on_last_stage:
            losses = torch.cat([batch.output for batch in batches])
        if self._comm.stage == 0 and self._weights is not None:
            gradients = torch.cat([batch.gradient for batch in batches])
        return losses, None if self._weights is None else gradients

    @property
    def _on_last_stage(self) -> bool:
        return self._comm.stage == self._comm.num_stages - 1

    def _batch(self, number: int, item: int) -> ItemOnStage:
        first = self._first[item]
        rows = slice(first, first + self._items[item].output_rows)
        return ItemOnStage(
            self._module,
            self._adapter,
            [self._items[item]],
            rows=self._rows[rows],
            targets=self._targets[number] if self._on_last_stage else None,
            weights=None if self._weights is None else self._weights[rows],
        )

    def _dummy_batch(self) -> ItemOnStage:
        # As in ``compute``: a dummy runs because every rank must issue all collectives.
        rows, targets, items = self._adapter.dummy()
        targets = targets if self._on_last_stage else None
        weights = torch.zeros(rows.shape[0], device=self._device)
        return ItemOnStage(self._module, self._adapter, items, rows=rows, targets=targets, weights=weights)

    def _placed(self, arrived: Arrived, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        rows = torch.zeros((self._num_rows, *shape), dtype=dtype, device=self._device)
        for piece, values in arrived:
            self.cut(rows, piece).copy_(values)
        return rows


def places_of_rank(pieces: Sequence[Piece], rank: int) -> Places:
    """Return positions of runs of items in the rows that ``rank`` keeps, by (item, first row of the run)."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    start = 0
    for piece in sorted((p for p in pieces if p.target == rank), key=lambda p: (p.item, p.start)):
        places[piece.item, piece.start] = (start, start + piece.stop - piece.start)
        start += piece.stop - piece.start
    return places


def _rows(given: GivenRows | None) -> torch.Tensor:
    assert given is not None, "rows come from the last stage"
    return given.rows


def _weights(given: GivenRows | None) -> torch.Tensor:
    assert given is not None and given.weights is not None
    return given.weights
