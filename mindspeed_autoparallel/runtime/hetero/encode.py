"""Encoding one macro-batch: inputs to the owner, the encoder under its state, outputs to the first stage; and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mindspeed_autoparallel.runtime.hetero.exchange import Arrived, Exchange, Transfer
from mindspeed_autoparallel.runtime.hetero.modules import Encoder
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece, RedistributionPlan
from mindspeed_autoparallel.runtime.hetero.rng import Generators
from mindspeed_autoparallel.runtime.hetero.states import ModuleStates


class MacroBatch:
    """The items of a few microbatches that one encoder computes together, from inputs to gradients.

    ``start`` and ``finish`` bring the output rows, ``start_backward`` and ``finish_backward`` take their gradients;
    what lies between a start and its finish overlaps with the transfer. Each is collective, in the same order on every
    rank. ``keep_graph`` False drops the graph after the forward and runs the encoder again before its backward.
    """

    def __init__(
        self,
        encoder: Encoder,
        plan: RedistributionPlan,
        exchange: Exchange,
        states: ModuleStates,
        *,
        replica: int,
        train: bool,
        keep_graph: bool,
    ) -> None:
        self._encoder, self._plan, self._exchange, self._states = encoder, plan, exchange, states
        self._mine = plan.owned_by(replica)
        self._train, self._keep_graph = train, keep_graph
        self._first_row: dict[int, int] = {}
        self._num_rows = 0
        for item in self._mine:
            self._first_row[item] = self._num_rows
            self._num_rows += plan.items[item].output_rows
        self._rows: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._transfer: Transfer | None = None
        self._randomness: Generators | None = None
        self._device = next(encoder.module.parameters()).device

    def start(self, inputs: Mapping[int, torch.Tensor]) -> None:
        """Encode and send. ``inputs``: rows of the items this rank holds, by index ``[input_rows, *input_shape]``."""
        if not self._plan.items:
            return
        adapter = self._encoder.adapter
        arrived = self._exchange.start(
            self._plan.inputs,
            lambda piece: inputs[piece.item][piece.start : piece.stop],
            row_shape=adapter.input_shape,
            dtype=adapter.input_dtype,
            device=self._device,
            kind="inputs",
        ).finish()
        # The plan orders pieces by source; the encoder takes its items in their own order.
        by_item = [rows for _, rows in sorted(arrived, key=lambda pair: pair[0].item)]
        self._rows = _joined(by_item, adapter.input_shape, adapter.input_dtype, self._device)
        graph = self._train and self._keep_graph
        if self._train and not graph:
            with self._running():
                self._randomness = Generators.now()
        with self._running():
            output = self._forward(graph)
        detached = output.detach()
        if graph:
            self._output = output
        if not (self._train and not graph):
            self._rows = None
        self._transfer = self._travel(self._plan.outputs, lambda piece: self._slice(detached, piece), "outputs")

    def finish(self, items: Sequence[int]) -> torch.Tensor:
        """Return output rows of these items, which this rank merges, one after another; rows of other ranks' tokens are
        0."""
        adapter = self._encoder.adapter
        first, total = {}, 0
        for item in items:
            first[item] = total
            total += self._plan.items[item].output_rows
        merged = torch.zeros((total, *adapter.output_shape), dtype=adapter.output_dtype, device=self._device)
        for piece, rows in self._arrived():
            merged[first[piece.item] + piece.start : first[piece.item] + piece.stop] = rows
        return merged

    def start_backward(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Send the gradients of the merged rows, by item index, to the members of their owners."""
        if self._plan.items:
            self._transfer = self._travel(
                self._plan.gradients, lambda piece: gradients[piece.item][piece.start : piece.stop], "gradients"
            )

    def finish_backward(self) -> None:
        """Run the encoder's backward with what arrived."""
        if not self._plan.items:
            return
        arrived = self._arrived()
        with self._running():
            output = self._forward_again() if self._output is None else self._output
            gradient = torch.zeros_like(output)
            for piece, rows in arrived:
                self._slice(gradient, piece).add_(rows)
            torch.autograd.backward(output, gradient)
        self._output = self._rows = None

    def _travel(self, pieces: Sequence[Piece], rows_of: Callable[[Piece], torch.Tensor], kind: str) -> Transfer:
        adapter = self._encoder.adapter
        return self._exchange.start(
            pieces,
            rows_of,
            row_shape=adapter.output_shape,
            dtype=adapter.output_dtype,
            device=self._device,
            kind=kind,
        )

    def _arrived(self) -> Arrived:
        transfer, self._transfer = self._transfer, None
        return [] if transfer is None else transfer.finish()

    def _forward(self, graph: bool) -> torch.Tensor:
        adapter = self._encoder.adapter
        items: Sequence[Any] = [self._plan.items[i] for i in self._mine]
        rows = self._rows
        if not items:
            rows, items = adapter.dummy()
        with torch.set_grad_enabled(graph):
            output: torch.Tensor = adapter.encode(self._encoder.module, rows, items)
        # A dummy's rows reach nobody: its gradient stays zero, but all collectives are issued.
        return output

    def _forward_again(self) -> torch.Tensor:
        assert self._randomness is not None, "backward without a forward"
        now = Generators.now()
        self._randomness.restore()
        try:
            return self._forward(graph=True)
        finally:
            now.restore()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Use the encoder's parallel state and generators inside the block."""
        with self._states.use(self._encoder.name), self._states.drawing(self._encoder.name):
            yield

    def _slice(self, output: torch.Tensor, piece: Piece) -> torch.Tensor:
        first = self._first_row[piece.item]
        return output[first + piece.start : first + piece.stop]


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...], dtype: Any, device: Any) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty((0, *shape), dtype=dtype, device=device)
