"""One macro-batch: send inputs to the owner, encode them under the encoder's state, send outputs to the first stage;
then the backward.

With its own pipeline, each stage of the encoder has its ``MacroBatch``: inputs go to the first stage, outputs come from
the last, and ``pipeline`` runs the stages between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.exchange import AllToAll, Arrived, Transfer
from mindspeed_autoparallel.runtime.hetero.modules import Encoder
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece, RedistributionPlan
from mindspeed_autoparallel.runtime.hetero.rng import Generators
from mindspeed_autoparallel.runtime.hetero.states import ModuleStates


class MacroBatch:
    """The items of a few microbatches that one encoder computes together, from inputs to gradients.

    ``start`` and ``finish`` produce the output rows, ``start_backward`` and ``finish_backward`` consume their
    gradients; work between a start and its finish overlaps the transfer. Each call is collective, in the same order on
    every rank. ``keep_graph`` False drops the graph after the forward and runs the encoder again before its backward.
    """

    def __init__(
        self,
        encoder: Encoder,
        plan: RedistributionPlan,
        exchange: AllToAll,
        states: ModuleStates,
        *,
        replica: int,
        stage: int = 0,
        train: bool,
        keep_graph: bool,
    ) -> None:
        self._encoder, self._plan, self._exchange, self._states = encoder, plan, exchange, states
        self._mine = plan.owned_by(replica)
        self._train, self._keep_graph, self._stage = train, keep_graph, stage
        self._first_row: dict[int, int] = {}
        self._num_rows = 0
        for item in self._mine:
            self._first_row[item] = self._num_rows
            self._num_rows += plan.items[item].output_rows
        self._rows: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._leaf: torch.Tensor | None = None
        self._transfer: Transfer | None = None
        self._randomness: Generators | None = None
        self._device = next(encoder.module.parameters()).device

    @property
    def empty(self) -> bool:
        """Return whether no rank has an item, so that no rank computes or sends anything."""
        return not self._plan.items

    @property
    def arriving_shape(self) -> tuple[int, ...]:
        """Shape of the previous stage's output; ``ConfigError`` if the adapter does not compute it."""
        adapter: Any = self._encoder.adapter
        if not hasattr(adapter, "arriving_shape"):
            raise ConfigError(
                f"{self._encoder.name}: {type(adapter).__name__} has no arriving_shape: a later stage of this "
                "encoder cannot run alone. Give the adapter that method (docs/hetero-parallel.md)."
            )
        items = [self._plan.items[i] for i in self._mine] or adapter.dummy()[1]
        shape: tuple[int, ...] = adapter.arriving_shape(self._encoder.module, items)
        return shape

    def start(self, inputs: Mapping[int, torch.Tensor]) -> None:
        """Encode and send. ``inputs``: rows ``[input_rows, *input_shape]`` of the items this rank holds, by index."""
        if self.empty:
            return
        self.start_inputs(inputs)
        with self._states.computing(self._encoder.name):
            self.advance(None)

    def start_inputs(self, inputs: Mapping[int, torch.Tensor]) -> None:
        """Start sending the inputs to the owners; ``inputs`` as for ``start``."""
        if self.empty:
            return
        adapter = self._encoder.adapter
        self._transfer = self._exchange.start(
            self._plan.inputs,
            lambda piece: inputs[piece.item][piece.start : piece.stop],
            row_shape=adapter.input_shape,
            dtype=adapter.input_dtype,
            device=self._device,
            kind="inputs",
        )

    def advance(self, received: torch.Tensor | None) -> torch.Tensor:
        """Run this stage's forward and send the last stage's rows; the encoder's state must be current.

        ``received``: output of the previous stage, None on the first stage, which uses the inputs.
        """
        adapter = self._encoder.adapter
        # The plan orders pieces by source; the encoder takes them by item.
        by_item = [rows for _, rows in sorted(self._arrived(), key=lambda pair: pair[0].item)]
        if self._stage == 0:
            self._rows = _joined(by_item, adapter.input_shape, adapter.input_dtype, self._device)
        graph = self._train and self._keep_graph
        again = self._train and not graph
        if again:
            self._randomness = Generators.now()
        leaf = _leaf(received, graph)
        output = self._forward(graph, leaf)
        detached = output.detach()
        if graph:
            self._output, self._leaf = output, leaf
        if not again:
            self._rows = None
        self._transfer = self._travel(self._plan.outputs, lambda piece: self._slice(detached, piece), "outputs")
        return detached

    def finish(self, items: Sequence[int]) -> torch.Tensor:
        """Return the output rows of ``items``, which this rank merges, one after another: ``[rows, *output_shape]``.

        Rows of other ranks' tokens are 0.
        """
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
        """Run the encoder's backward with the received gradients."""
        if self.empty:
            return
        with self._states.computing(self._encoder.name):
            # A recomputed forward does not need the incoming gradients, so it hides their transfer.
            _, output = self.graph(None)
            torch.autograd.backward(output, self.output_gradient(output))
        self.forget()

    def graph(self, received: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the leaf made of ``received`` (None on the first stage) and the output computed from it; its
        forward runs again unless its graph was kept."""
        if self._output is None:
            leaf = _leaf(received, True)
            return leaf, self._forward_again(leaf)
        leaf, output = self._leaf, self._output
        self._leaf = self._output = None
        return leaf, output

    def output_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """Wait for the gradient of ``output``, this replica's rows, and return it; zero for a dummy."""
        gradient = torch.zeros_like(output)
        for piece, rows in self._arrived():
            self._slice(gradient, piece).add_(rows)
        return gradient

    def forget(self) -> None:
        """Wait for a pending transfer, drop its rows, and release all tensors."""
        self._arrived()
        self._output = self._leaf = self._rows = None

    def _travel(self, pieces: Sequence[Piece], rows_of: Callable[[Piece], torch.Tensor], kind: str) -> Transfer:
        adapter = self._encoder.adapter
        return self._exchange.start(
            pieces, rows_of, row_shape=adapter.output_shape, dtype=adapter.output_dtype, device=self._device, kind=kind
        )

    def _arrived(self) -> Arrived:
        transfer, self._transfer = self._transfer, None
        return [] if transfer is None else transfer.finish()

    def _forward(self, graph: bool, leaf: torch.Tensor | None) -> torch.Tensor:
        adapter: Any = self._encoder.adapter
        items: Sequence[Any] = [self._plan.items[i] for i in self._mine]
        rows = self._rows
        if not items:
            # No module uses a dummy's rows: its gradient is zero. It runs so that every rank issues all collectives.
            rows, items = adapter.dummy()
        with torch.set_grad_enabled(graph):
            output: torch.Tensor = (
                adapter.encode(self._encoder.module, rows, items)
                if self._stage == 0
                else adapter.encode_later_stage(self._encoder.module, leaf, items)
            )
        return output

    def _forward_again(self, leaf: torch.Tensor | None) -> torch.Tensor:
        assert self._randomness is not None, "backward without a forward"
        now = Generators.now()
        self._randomness.restore()
        try:
            return self._forward(True, leaf)
        finally:
            now.restore()

    def _slice(self, output: torch.Tensor, piece: Piece) -> torch.Tensor:
        first = self._first_row[piece.item]
        return output[first + piece.start : first + piece.stop]


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...], dtype: Any, device: Any) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty((0, *shape), dtype=dtype, device=device)


def _leaf(received: torch.Tensor | None, graph: bool) -> torch.Tensor | None:
    return None if received is None else received.detach().requires_grad_(graph)
