"""Encoding one macro-batch: inputs to the owner, the encoder under its state, outputs to the first stage; and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.runtime.hetero.exchange import Exchange
from mindspeed_autoparallel.runtime.hetero.modules import Encoder
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece, RedistributionPlan
from mindspeed_autoparallel.runtime.hetero.states import ModuleStates


@dataclass
class _Randomness:
    """All generators an encoder may use, so that a second forward draws the same numbers."""

    default: Any
    accelerator: Any
    tracker: dict[str, Any]

    @staticmethod
    def now() -> _Randomness:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return _Randomness(torch.get_rng_state(), torch.cuda.get_rng_state(), dict(get_cuda_rng_tracker().states_))

    def restore(self) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        torch.set_rng_state(self.default)
        torch.cuda.set_rng_state(self.accelerator)
        get_cuda_rng_tracker().states_.update(self.tracker)


class MacroBatch:
    """The items of a few microbatches that one encoder computes together, from inputs to gradients.

    ``inputs``: input rows of the items this rank holds, by item index ``[input_rows, *input_shape]``. ``keep_graph``
    False (memory mode recompute) drops the graph after the forward and runs the encoder again before its backward.
    """

    def __init__(
        self,
        encoder: Encoder,
        plan: RedistributionPlan,
        exchange: Exchange,
        states: ModuleStates,
        *,
        replica: int,
        rank: int,
        train: bool,
        keep_graph: bool,
    ) -> None:
        self._encoder, self._plan, self._exchange, self._states = encoder, plan, exchange, states
        self._mine = plan.owned_by(replica)
        self._rank, self._train, self._keep_graph = rank, train, keep_graph
        self._rows: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._randomness: _Randomness | None = None
        self._device = next(encoder.module.parameters()).device

    def encode(self, inputs: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Output rows of the items whose merge happens on this rank, by item index. Collective."""
        if not self._plan.items:
            return {}
        adapter = self._encoder.adapter
        arrived = self._exchange.move(
            self._plan.inputs,
            lambda piece: inputs[piece.item][piece.start : piece.stop],
            row_shape=adapter.input_shape,
            dtype=adapter.input_dtype,
            device=self._device,
            kind="inputs",
        )
        # The plan orders pieces by source; the encoder takes its items in their own order.
        by_item = [rows for _, rows in sorted(arrived, key=lambda pair: pair[0].item)]
        self._rows = _joined(by_item, adapter.input_shape, adapter.input_dtype, self._device)
        graph = self._train and self._keep_graph
        if self._train and not graph:
            with self._states.use(self._encoder.name):
                self._randomness = _Randomness.now()
        output = self._forward(graph)
        detached = output.detach()
        if graph:
            self._output = output
        merged = self._exchange.move(
            self._plan.outputs,
            lambda piece: self._slice(detached, piece),
            row_shape=adapter.output_shape,
            dtype=adapter.output_dtype,
            device=self._device,
            kind="outputs",
        )
        by_start = sorted(merged, key=lambda pair: pair[0].start)
        return {
            item: torch.cat([rows for piece, rows in by_start if piece.item == item])
            for item in sorted({piece.item for piece, _ in merged})
        }

    def backward(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Bring the merged rows' gradients (by item index) to the owner and run its backward. Collective."""
        if not self._plan.items:
            return
        adapter = self._encoder.adapter
        arrived = self._exchange.move(
            self._plan.gradients,
            lambda piece: gradients[piece.item][piece.start : piece.stop],
            row_shape=adapter.output_shape,
            dtype=adapter.output_dtype,
            device=self._device,
            kind="gradients",
        )
        output = self._output
        if output is None:
            output = self._forward_again()
        gradient = torch.zeros_like(output)
        for piece, rows in arrived:
            self._slice(gradient, piece).add_(rows)
        with self._states.use(self._encoder.name):
            torch.autograd.backward(output, gradient)
        self._output = self._rows = None

    def _forward(self, graph: bool) -> torch.Tensor:
        adapter = self._encoder.adapter
        items: Sequence[Any] = [self._plan.items[i] for i in self._mine]
        rows = self._rows
        if not items:
            rows, items = adapter.dummy()
        with self._states.use(self._encoder.name), torch.set_grad_enabled(graph):
            output: torch.Tensor = adapter.encode(self._encoder.module, rows, items)
        # A dummy's rows reach nobody: its gradient stays zero, but all collectives are issued.
        return output

    def _forward_again(self) -> torch.Tensor:
        assert self._randomness is not None, "backward without a forward"
        with self._states.use(self._encoder.name):
            now = _Randomness.now()
            self._randomness.restore()
            try:
                return self._forward(graph=True)
            finally:
                now.restore()

    def _slice(self, output: torch.Tensor, piece: Piece) -> torch.Tensor:
        start = sum(self._plan.items[i].output_rows for i in self._mine if i < piece.item)
        return output[start + piece.start : start + piece.stop]


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...], dtype: Any, device: Any) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty((0, *shape), dtype=dtype, device=device)
