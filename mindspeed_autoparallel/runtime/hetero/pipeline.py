"""An encoder's own pipeline: Megatron's stock 1F1B schedule over its groups, with macro-batches as microbatches.

The encoder runs twice through the schedule: forward only before the backbone, forward and backward after it, when the
gradients of its outputs are known. In the second pass a stage whose graph was kept (memory mode upfront) passes on the
output it already has and computes only the backward; otherwise (recompute) it runs its forward again. Both times the
caller has made the encoder's parallel state and generators current.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mindspeed_autoparallel.runtime.megatron.exchanged_shapes import arriving


class StageBatch(Protocol):
    """One macro-batch on one stage of the encoder's pipeline."""

    @property
    def arriving_shape(self) -> tuple[int, ...]:
        """Shape of the previous stage's output; read only if this rank runs alone, without that stage."""

    def advance(self, received: torch.Tensor | None) -> torch.Tensor:
        """Run the stage's forward; ``received [rows, 1, width]`` from the stage before, None on the first."""

    def graph(self, received: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the leaf that the forward used for ``received``, and its output with the graph."""

    def output_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``output``; called on the last stage."""


class _Stage(torch.nn.Module):
    """The model that the stock schedule runs: one stage of the encoder."""

    def __init__(self, config: Any) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config = _schedule_config(config)
        self.model_type = ModelType.encoder_or_decoder
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        """Set the tensor from the previous stage; called by Megatron's schedules."""
        self.received = tensor[0] if isinstance(tensor, list) else tensor


class _ThroughGraph(torch.autograd.Function):
    """Passes on an output with an existing graph; its backward runs that graph's and returns the leaf's gradient."""

    @staticmethod
    def forward(
        ctx: Any, received: torch.Tensor, leaf: torch.Tensor | None, output: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.leaf, ctx.output = leaf, output[0]
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        leaf, output = ctx.leaf, ctx.output
        ctx.leaf = ctx.output = None
        if output.requires_grad:
            torch.autograd.backward(output, gradients[0])
        if leaf is None:
            return None, None, None
        # After a frozen stage no gradient reaches the leaf, but the previous stage waits for one.
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, None, None


class _Weighed(torch.autograd.Function):
    """A scalar whose gradient with respect to ``output`` is ``gradient``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


def run_forward(config: Any, batches: Sequence[StageBatch]) -> None:
    """Run every batch through the pipeline, in order (collective over the encoder's pipeline ranks)."""

    def step(iterator: Any, stage: _Stage) -> tuple[torch.Tensor, Callable[..., Any]]:
        output = next(iterator).advance(stage.received)
        return output.detach(), lambda rows: _reported(rows.new_zeros(()))

    _run(config, batches, step, forward_only=True)


def run_backward(config: Any, batches: Sequence[StageBatch]) -> None:
    """Run every batch's backward, and its forward again if no graph was kept (collective as ``run_forward``)."""

    def step(iterator: Any, stage: _Stage) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, received = next(iterator), stage.received
        leaf, output = batch.graph(received)
        # Without an input from a previous stage, some tensor must still require a gradient.
        root = torch.zeros((), device=output.device, requires_grad=True) if received is None else received
        handed = _ThroughGraph.apply(root, leaf, [output])  # type: ignore[no-untyped-call]
        return handed, lambda rows: _reported(
            _Weighed.apply(rows, batch.output_gradient(rows.detach()))  # type: ignore[no-untyped-call]
        )

    _run(config, batches, step, forward_only=False)


def _run(config: Any, batches: Sequence[StageBatch], step: Callable[..., Any], *, forward_only: bool) -> None:
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving

    if not batches:
        return
    gradients = contextlib.nullcontext() if forward_only else torch.enable_grad()
    with gradients, arriving(lambda: (batch.arriving_shape for batch in batches)):
        forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=_Stage(config),
            num_microbatches=len(batches),
            # Placeholders: stages exchange the shapes.
            seq_length=1,
            micro_batch_size=1,
            decoder_seq_length=1,
            forward_only=forward_only,
        )


def _reported(total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return a loss that the schedule neither scales nor averages."""
    return total, torch.ones((), dtype=torch.int, device=total.device), {}


def _schedule_config(config: Any) -> Any:
    """Return a copy of the encoder's config under which the schedule passes tensors on and does nothing else."""
    own = copy.copy(config)
    changes = {
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "pipeline_dtype": config.pipeline_dtype or config.params_dtype,
        "batch_p2p_comm": True,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": False,
        "finalize_model_grads_func": None,
        "no_sync_func": None,
        "grad_sync_func": None,
        "param_sync_func": None,
        "grad_scale_func": None,
        "timers": None,
        "num_microbatches_with_partial_activation_checkpoints": None,
        # Each would set a process-wide scale that the backbone's next backward applies to its losses.
        "num_moe_experts": None,
        "mtp_num_layers": None,
        "experimental_attention_variant": None,
        "experimental_attention_variant_loss_scale_func": None,
    }
    for name, value in changes.items():
        setattr(own, name, value)
    return own
