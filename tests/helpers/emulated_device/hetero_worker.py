"""One rank of hetero steps: ``runtime.hetero`` itself around Megatron's own schedule, computing by a virtual clock."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspeed_autoparallel  # before megatron

assert mindspeed_autoparallel.__version__
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from emulated_device.hetero_cases import INPUT_WIDTH, ROWS, SHAPE, HeteroCase  # noqa: E402
from emulated_device.hetero_network import HeteroNetwork  # noqa: E402
from emulated_device.stage import EmulatedStage, Rank  # noqa: E402
from mindspeed_autoparallel.runtime.hetero import phases  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import LocalItem  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.modules import Encoder  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.rng import ModuleRandomStates  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.session import open_session  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.states import GroupMemo, ModuleStates  # noqa: E402

ENCODER, BACKBONE, GENERATOR = "image_encoder", "text_decoder", "image_generator"


def run_cases(file: str) -> list[dict[str, Any]]:
    """This rank's part of every case in the JSON file; each is for all ranks."""
    dist.init_process_group("gloo")
    pristine = {k: copy.copy(v) if isinstance(v, (list, dict)) else v for k, v in vars(ps).items() if k[0] == "_"}
    # One memo for all cases: every gloo group has threads of its own.
    groups = GroupMemo()
    results = []
    for number, values in enumerate(json.loads(Path(file).read_text(encoding="utf-8"))):
        vars(ps).update({k: copy.copy(v) if isinstance(v, (list, dict)) else v for k, v in pristine.items()})
        results.append(_run(HeteroCase(**values), number, groups))
    dist.barrier()
    dist.destroy_process_group()
    return results


def _run(case: HeteroCase, number: int, groups: GroupMemo) -> dict[str, Any]:
    states = ModuleStates(ps, groups)
    with groups.installed(ps):
        virtual = case.virtual_size if case.virtual_size > 1 else None
        ps.initialize_model_parallel(case.tensor_size, case.pipeline_size, virtual)
    states.adopt(BACKBONE)
    _build(states, ENCODER, case.encoder_tensor_size, case.encoder_pipeline_size)
    if case.generator_forward_ns:
        _build(states, GENERATOR, case.generator_tensor_size, len(case.generator_forward_ns))
    ModuleRandomStates(states).seed(7)
    rank = Rank(case.sleeping)
    chunks = _chunks(case, rank)
    with states.use(ENCODER):
        chunks[0].image_encoder.stage = ps.get_pipeline_model_parallel_rank()
    encoder_config = _config(case.encoder_tensor_size, case.encoder_pipeline_size)
    encoder = Encoder(ENCODER, chunks[0].image_encoder, _Adapter(), case.scale, encoder_config)
    generators = []
    if case.generator_forward_ns:
        generator = chunks[0].image_generator = EmulatedGenerator(rank, case)
        with states.use(GENERATOR):
            generator.stage = ps.get_pipeline_model_parallel_rank()
        config = _config(case.generator_tensor_size, len(case.generator_forward_ns))
        generators = [Encoder(GENERATOR, generator, _GeneratorAdapter(), 1, config)]
    session = open_session(
        states, BACKBONE, [encoder], generators=generators, memory=case.memory, sequence_parallel=case.sequence_parallel
    )
    dp_replica = ps.get_data_parallel_rank()
    size = case.micro_batch_size
    batches = [[dp_replica * 10_000 + m * size + i for i in range(size)] for m in range(case.num_microbatches)]
    store = dist.PrefixStore(f"hetero/{number}", dist.distributed_c10d._get_default_store())
    session.learn_batch_owners(True)
    network = contextlib.nullcontext() if case.sleeping else HeteroNetwork(rank, store, case)
    dist.barrier()
    started = time.perf_counter()
    with network:
        phases.run(
            session,
            get_forward_backward_func(),
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in chunks] if virtual else iter(batches),
            model=chunks if virtual else chunks[0],
            num_microbatches=case.num_microbatches,
            seq_length=SHAPE[0],
            micro_batch_size=SHAPE[1],
            decoder_seq_length=SHAPE[0],
        )
        step_ns = round((time.perf_counter() - started) * 1e9) if case.sleeping else rank.clock.now_ns
    return {"step_ns": step_ns, "busy_ns": rank.clock.busy_ns, "encoded": chunks[0].image_encoder.encoded}


def _build(states: ModuleStates, name: str, tensor_size: int, pipeline_size: int) -> None:
    alone = lambda ranks, *unused: ranks[:1]  # no weight is shared between a module's stages
    ends = {"get_embedding_ranks": alone, "get_position_embedding_ranks": alone} if pipeline_size > 1 else {}
    states.build(name, functools.partial(ps.initialize_model_parallel, tensor_size, pipeline_size, **ends))


def _config(tensor_size: int, pipeline_size: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=pipeline_size,
        hidden_size=SHAPE[2],
        num_attention_heads=tensor_size,
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
    )


def _chunks(case: HeteroCase, rank: Rank) -> list[HeteroStage]:
    size, virtual = case.pipeline_size, case.virtual_size
    config = TransformerConfig(
        num_layers=size * virtual,
        hidden_size=SHAPE[2],
        num_attention_heads=case.tensor_size,
        tensor_model_parallel_size=case.tensor_size,
        pipeline_model_parallel_size=size,
        pipeline_dtype=torch.float32 if size > 1 else None,
        deallocate_pipeline_outputs=True,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
    )
    # As megatron.training derives them.
    config.overlap_p2p_comm, config.batch_p2p_comm = virtual > 1, virtual == 1
    count = case.num_microbatches
    chunks = []
    for chunk in range(virtual):
        position = chunk * size + ps.get_pipeline_model_parallel_rank()
        chunks.append(
            HeteroStage(
                config,
                rank,
                chunk=chunk,
                virtual_stage=position,
                num_virtual=size * virtual,
                forward_ns=[case.forward_ns[position]] * count,
                backward_ns=[case.backward_ns[position]] * count,
                blocks=(),
                shape=SHAPE,
            )
        )
    chunks[0].image_encoder = EmulatedEncoder(rank, case)
    return chunks


class HeteroStage(EmulatedStage):
    """The first stage calls its encoder, and the last its generator, as a host's model does."""

    image_encoder: EmulatedEncoder

    def forward(self, batch: Sequence[int]) -> torch.Tensor:  # type: ignore[override]  # of a microbatch
        output = self._decode(batch)
        generator = getattr(self, "image_generator", None)
        if generator is None or self.virtual_stage < self.num_virtual - 1:
            return output
        rows = torch.zeros((ROWS * len(batch), SHAPE[2])) + 0.0 * output.sum()
        losses = generator(rows, len(batch))
        return output + 0.0 * losses.sum()

    def _decode(self, batch: Sequence[int]) -> torch.Tensor:
        if self.virtual_stage == 0:
            rows = self.image_encoder(batch)
            if rows.shape[0] != ROWS * len(batch):
                raise AssertionError(f"{rows.shape[0]} rows for {len(batch)} samples")
            # The first stage's input hangs on the rows, so that their gradients come.
            self.input = torch.zeros(SHAPE) + 0.0 * rows.sum()
            microbatch, self.next_microbatch = self.next_microbatch, self.next_microbatch + 1
            return _compute(self.input, self, microbatch)
        return super().forward()


def _compute(received: torch.Tensor, stage: EmulatedStage, microbatch: int) -> torch.Tensor:
    from emulated_device.stage import _Compute

    return _Compute.apply(received, stage, microbatch)  # type: ignore[no-any-return]  # torch is untyped here


class EmulatedEncoder(torch.nn.Module):
    """Takes the time of as many samples as it is given; trainable, so that it has a backward."""

    def __init__(self, rank: Rank, case: HeteroCase) -> None:
        super().__init__()
        self.rank, self.case, self.encoded, self.stage = rank, case, 0, 0
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, received: torch.Tensor | None, num_samples: int) -> torch.Tensor:
        return _Encode.apply(self.weight, received, self, num_samples)  # type: ignore[no-any-return]  # torch is untyped here


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, received: torch.Tensor | None, encoder: EmulatedEncoder, num_samples: int
    ) -> torch.Tensor:
        ctx.encoder, ctx.num_samples, ctx.received = encoder, num_samples, received
        encoder.encoded += num_samples * (encoder.stage == 0)
        encoder.rank.compute("F", -1, num_samples, encoder.case.encoder_forward_ns[encoder.stage][num_samples])
        rows = max(1, num_samples) * ROWS
        last = encoder.stage == encoder.case.encoder_pipeline_size - 1
        return torch.ones((rows, SHAPE[2]) if last else (rows, 1, SHAPE[2]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        encoder = ctx.encoder
        encoder.rank.compute("B", -1, ctx.num_samples, encoder.case.encoder_backward_ns[encoder.stage][ctx.num_samples])
        return torch.zeros(()), None if ctx.received is None else torch.zeros_like(ctx.received), None, None


class EmulatedGenerator(torch.nn.Module):
    """Takes the time of as many samples as it is given, forward and backward."""

    def __init__(self, rank: Rank, case: HeteroCase) -> None:
        super().__init__()
        self.rank, self.case, self.stage = rank, case, 0
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, rows: torch.Tensor, num_samples: int) -> torch.Tensor:
        return _Generate.apply(self.weight, rows, self, num_samples)  # type: ignore[no-any-return]  # torch is untyped here


class _Generate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: torch.Tensor, generator: EmulatedGenerator, num_samples: int
    ) -> torch.Tensor:
        ctx.generator, ctx.num_samples, ctx.shape = generator, num_samples, rows.shape
        times = generator.case.generator_forward_ns
        generator.rank.compute("F", -2, num_samples, times[generator.stage][num_samples])
        last = generator.stage == len(times) - 1
        return torch.zeros(rows.shape[0]) if last else torch.ones((rows.shape[0], 1, SHAPE[2]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        generator = ctx.generator
        times = generator.case.generator_backward_ns[generator.stage]
        generator.rank.compute("B", -2, ctx.num_samples, times[ctx.num_samples])
        return torch.zeros(()), torch.zeros(ctx.shape), None, None


class _Adapter:
    """One item a sample; a dummy takes no time."""

    input_shape, output_shape, meta_size = (INPUT_WIDTH,), (SHAPE[2],), 0
    input_dtype = output_dtype = torch.float32

    def items(self, batch: Sequence[int]) -> list[LocalItem]:
        return [LocalItem(sample, 1, ROWS, 1.0, (), 0, ROWS) for sample in batch]

    def rows(self, batch: Sequence[int]) -> torch.Tensor:
        return torch.zeros((len(batch), INPUT_WIDTH))

    def encode(self, module: EmulatedEncoder, rows: torch.Tensor, items: Sequence[Any]) -> torch.Tensor:
        return self.encode_later_stage(module, None, items)

    def encode_later_stage(
        self, module: EmulatedEncoder, hidden: torch.Tensor | None, items: Sequence[Any]
    ) -> torch.Tensor:
        dummy = any(item.sample < 0 for item in items)
        return module(hidden, 0 if dummy else len(items))  # type: ignore[no-any-return]  # torch is untyped here

    def dummy(self) -> tuple[torch.Tensor, list[LocalItem]]:
        return torch.zeros((1, INPUT_WIDTH)), [LocalItem(-1, 1, ROWS, 1.0)]

    def embeddings(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class _GeneratorAdapter(_Adapter):
    """Items and rows as an encoder's; a sample's rows are the decoder's."""

    def generate(
        self, module: EmulatedGenerator, rows: torch.Tensor, targets: torch.Tensor | None, items: Sequence[Any]
    ) -> torch.Tensor:
        dummy = any(item.sample < 0 for item in items)
        return module(rows, 0 if dummy else len(items))  # type: ignore[no-any-return]  # torch is untyped here

    generate_later_stage = generate

    def arriving_shape(self, module: EmulatedGenerator, items: Sequence[Any]) -> tuple[int, int, int]:
        return ROWS * len(items), 1, SHAPE[2]

    def dummy(self) -> tuple[torch.Tensor, torch.Tensor, list[LocalItem]]:  # type: ignore[override]  # rows come first
        return torch.zeros((ROWS, SHAPE[2])), *super().dummy()


def _forward_step(iterator: Iterator[Any], stage: HeteroStage, *_: Any) -> tuple[torch.Tensor, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.sum()
        return value, {"loss": value.detach().clone()}

    return stage(next(iterator)), loss
