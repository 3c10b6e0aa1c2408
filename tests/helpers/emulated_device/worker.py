"""One rank: runs the cases one after another through Megatron's schedule and returns its observations."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import mindspeed_autoparallel  # before megatron

assert mindspeed_autoparallel.__version__
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import package_info  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from emulated_device.cases import Case  # noqa: E402
from emulated_device.network import EmulatedNetwork  # noqa: E402
from emulated_device.stage import EmulatedStage, Rank  # noqa: E402
from mindspeed_autoparallel.schedule.dualpipev import chain_stage  # noqa: E402

SHAPE = (2, 1, 4)
"""Sequence, batch, hidden of the tensors between stages."""


def run_cases(file: str) -> list[dict[str, Any]]:
    """This rank's part of every case in the JSON file; pipeline sizes divide the number of ranks.

    Ranks beyond a case's pipeline run replicas of it.
    """
    dist.init_process_group("gloo")
    cases = [Case.of_json(data) for data in json.loads(Path(file).read_text(encoding="utf-8"))]
    results: dict[int, dict[str, Any]] = {}
    # Groups are made once per pipeline size: each of gloo's keeps its threads until the process ends.
    for size in sorted({case.pipeline_size for case in cases}):
        ps.initialize_model_parallel(1, size)
        for number, case in enumerate(cases):
            if case.pipeline_size == size:
                virtual = case.virtual_size if case.virtual_size > 1 and not case.dualpipev else None
                ps.set_virtual_pipeline_model_parallel_world_size(virtual)
                ps.set_virtual_pipeline_model_parallel_rank(0 if virtual else None)
                results[number] = _run(case, number)
        dist.barrier()
        ps.destroy_model_parallel()
        for name in vars(ps):
            if name.endswith("_GLOBAL_RANKS"):
                setattr(ps, name, None)  # 0.12 forgets these
    dist.barrier()
    dist.destroy_process_group()
    return [results[number] for number in range(len(cases))]


def _run(case: Case, number: int) -> dict[str, Any]:
    rank = Rank(case.sleeping)
    chunks = _chunks(case, rank)
    store = dist.PrefixStore(f"emulated/{number}", dist.distributed_c10d._get_default_store())
    network = contextlib.nullcontext() if case.sleeping else EmulatedNetwork(rank.clock, store, case.link_ns)
    virtual = case.virtual_size > 1
    iterators = [iter(()) for _ in chunks]
    dist.barrier()
    started = time.perf_counter()
    with network, _streams(case):
        _schedule_of(case)(
            forward_step_func=_forward_step,
            data_iterator=iterators if virtual else iterators[0],
            model=chunks if virtual else chunks[0],
            num_microbatches=case.num_microbatches,
            seq_length=SHAPE[0],
            micro_batch_size=SHAPE[1],
            decoder_seq_length=SHAPE[0],
            forward_only=False,
        )
        pipeline_ns = round((time.perf_counter() - started) * 1e9) if case.sleeping else rank.clock.now_ns
    position = ps.get_pipeline_model_parallel_rank()
    if case.before_sync_ns:
        rank.clock.advance(case.before_sync_ns[position])
        latest = torch.tensor(rank.clock.now_ns)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=ps.get_pipeline_model_parallel_group())
        rank.clock.reach(int(latest))
        rank.clock.advance(case.after_sync_ns[position])
    return {
        "pipeline_rank": position,
        "replica": ps.get_data_parallel_rank(),
        "pipeline_ns": pipeline_ns,
        "step_ns": pipeline_ns if case.sleeping else rank.clock.now_ns,
        "busy_ns": rank.clock.busy_ns,
        "order": rank.order,
        "peak_bytes": rank.memory.peak,
        "held_bytes": rank.memory.used,
        "release": package_info.__version__,
    }


def _schedule_of(case: Case) -> Any:
    if not case.dualpipev:
        return get_forward_backward_func()
    from emulated_device.dualpipev import schedule_of

    return schedule_of(case.dualpipev)


def _streams(case: Case) -> contextlib.AbstractContextManager[None]:
    if not case.paired:
        return contextlib.nullcontext()
    from emulated_device.paired import without_streams  # not in 0.12

    return without_streams()


def _chunks(case: Case, rank: Rank) -> list[EmulatedStage]:
    size, virtual = case.pipeline_size, case.virtual_size
    interleaved = virtual > 1 and not case.dualpipev
    config = TransformerConfig(
        num_layers=size * virtual,
        hidden_size=SHAPE[2],
        num_attention_heads=1,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual if interleaved else None,
        pipeline_dtype=torch.float32 if size > 1 else None,
        deallocate_pipeline_outputs=case.free_outputs,
        microbatch_group_size_per_vp_stage=case.microbatch_group_size,
    )
    config.overlap_p2p_comm = interleaved and case.overlap
    config.overlap_p2p_comm_warmup_flush = interleaved and case.warmup_flush
    config.batch_p2p_comm = not config.overlap_p2p_comm  # as megatron.training derives it
    config.overlap_moe_expert_parallel_comm = case.paired
    chunks = []
    for chunk in range(virtual):
        rank_here = ps.get_pipeline_model_parallel_rank()
        stage = chain_stage(rank_here, chunk, size) if case.dualpipev else chunk * size + rank_here
        chunks.append(
            EmulatedStage(
                config,
                rank,
                chunk=chunk,
                virtual_stage=stage,
                num_virtual=size * virtual,
                forward_ns=case.forward_ns[stage],
                backward_ns=case.backward_ns[stage],
                blocks=case.blocks[stage] if case.blocks else (),
                shape=SHAPE,
                saving_ns=case.saving_ns,
                has_ends=case.has_ends,
            )
        )
    return chunks


def _forward_step(
    iterator: Any, stage: EmulatedStage, *_: Any, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.sum()
        return value, {"loss": value.detach().clone()}

    return stage.build_schedule_plan() if return_schedule_plan else stage(), loss
