"""The trainable modules: one DDP per module under its own state, with the module tree unchanged.

The backbone's DDP wraps the whole model chunk but must register only the backbone's parameters: ``requires_grad`` of
the encoders' parameters is cleared while it is built, and restored afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.runtime.hetero.adapters.protocol import EncoderAdapter
from mindspeed_autoparallel.runtime.hetero.states import ModuleStates


class OrderedReduction:
    """Starts the reductions of one DDP's bucket groups in the same order on every rank."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        self._starts = [group.start_grad_sync for group in groups]
        self._ready = [False] * len(groups)
        self._num_started = 0
        self._ordering = False
        self.num_by_hooks = 0
        """Number of reductions that hooks started during last backwards, since creation."""
        self.num_in_all = 0
        for number, group in enumerate(groups):
            group.start_grad_sync = functools.partial(self._is_ready, number)

    @contextlib.contextmanager
    def during(self, *, is_last: bool) -> Iterator[None]:
        """Run one macro-batch's backward inside the block. Every rank calls this for every macro-batch.

        In the last one, hooks start reductions; the remaining reductions start after the block.
        """
        if not is_last:
            with self._ddp.no_sync():
                yield
            return
        self._ready, self._num_started = [False] * len(self._starts), 0
        self._ordering = True
        yield
        self.num_by_hooks += self._num_started
        self.num_in_all += len(self._starts)
        self._ready = [True] * len(self._starts)
        self._start()
        self._ordering = False

    def _is_ready(self, number: int, *arguments: Any, **named: Any) -> None:
        """Replace a bucket group's ``start_grad_sync``."""
        if not self._ordering:
            # On the first step, finish_grad_sync starts every reduction again; Megatron ignores the second start.
            self._starts[number](*arguments, **named)
            return
        self._ready[number] = True
        self._start()

    def _start(self) -> None:
        while self._num_started < len(self._starts) and self._ready[self._num_started]:
            start = self._starts[self._num_started]
            self._num_started += 1
            start()


@dataclass
class Encoder:
    """One encoder of the job: the host's module, its adapter, its DDP once built."""

    name: str
    module: Any
    adapter: EncoderAdapter
    scale: int = 1
    """Microbatches of the backbone that are encoded together."""
    config: Any = None
    """Megatron config of the module; ``module.config`` by default."""
    ddp: Any = None
    reduction: OrderedReduction | None = None
    """Reductions during the last backward, if it overlaps them."""
    trainable: bool = field(init=False)

    def __post_init__(self) -> None:
        self.trainable = any(parameter.requires_grad for parameter in self.module.parameters())
        if self.config is None:
            self.config = self.module.config


@contextlib.contextmanager
def frozen(encoders: Sequence[Encoder]) -> Iterator[None]:
    """Clear ``requires_grad`` of the encoders' parameters inside the block; restore it afterwards."""
    marked = [p for encoder in encoders for p in encoder.module.parameters() if p.requires_grad]
    for parameter in marked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in marked:
            parameter.requires_grad_(True)


def broadcast_parameters(states: ModuleStates, encoder: Encoder) -> None:
    """Send parameters and buffers of the first data (x context) rank to all others, so that replicas start equal."""
    import torch

    with states.use(encoder.name):
        group = states.parallel_state.get_data_parallel_group(with_context_parallel=True)
        source = torch.distributed.get_process_group_ranks(group)[0]
        for tensor in (*encoder.module.parameters(), *encoder.module.buffers()):
            torch.distributed.broadcast(tensor.data, src=source, group=group)


def agree_trainable(states: ModuleStates, encoder: Encoder) -> None:
    """Mark the encoder as trainable on every pipeline stage if it is on one (a frozen tower, a trained projector)."""
    import torch

    with states.use(encoder.name):
        if states.parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        device = next(encoder.module.parameters()).device
        flag = torch.tensor([float(encoder.trainable)], device=device)
        group = states.parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
    encoder.trainable = bool(flag.item())


def build_ddp(states: ModuleStates, encoder: Encoder, ddp_config: Any, *, may_overlap: bool = False) -> None:
    """Wrap a trainable encoder in a DDP that sums gradients over data x context ranks.

    It reduces once, after the last backward. With ``may_overlap``, if the host overlaps and the encoder has no
    pipeline, it reduces bucket by bucket during that backward.
    """
    from megatron.core.distributed import DistributedDataParallel

    agree_trainable(states, encoder)
    if not encoder.trainable:
        return
    config = copy.copy(encoder.config)
    # DDP must not average: the backbone's factor is applied afterwards (docs/hetero-parallel.md, the gradient rule).
    config.calculate_per_token_loss = True
    own = copy.copy(ddp_config)
    with states.use(encoder.name):
        stages = states.parallel_state.get_pipeline_model_parallel_world_size()
    own.overlap_grad_reduce = bool(ddp_config.overlap_grad_reduce and may_overlap and stages == 1)
    own.overlap_param_gather = False
    own.average_in_collective = False
    with states.use(encoder.name):
        encoder.ddp = DistributedDataParallel(config, own, encoder.module)
    if own.overlap_grad_reduce:
        encoder.reduction = OrderedReduction(encoder.ddp)


def finalize_gradients(states: ModuleStates, encoder: Encoder, factor: Any) -> None:
    """Reduce the encoder's gradients under its own state and multiply by the backbone's ``factor``."""
    from megatron.core.distributed import finalize_model_grads

    if encoder.ddp is None:
        return
    with states.use(encoder.name):
        finalize_model_grads([encoder.ddp])
        encoder.ddp.scale_gradients(factor)
