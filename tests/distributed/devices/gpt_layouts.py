"""A tiny GPT of megatron.core trained under one layout after another in one job; every rank ends with a RESULT line.

``gpt_layouts.py <case>...`` with case = name of ``CASES``, or a case as JSON. Weights depend on the parameter's global name only, so
every layout starts from the same model; losses and gradient norms of all steps are comparable.
With ``WITHOUT_PLUGIN`` set, nothing of mindspeed_autoparallel is imported: a stand-in of the tests makes CPU do.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from typing import Any

WITHOUT_PLUGIN = bool(os.environ.get("WITHOUT_PLUGIN"))
if WITHOUT_PLUGIN:
    import bare_cpu

    bare_cpu.install()
else:
    import mindspeed_autoparallel  # before megatron

    assert mindspeed_autoparallel.__version__
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, package_info  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

Case = dict[str, Any]

SEQUENCE, BATCH, VOCABULARY, NUM_LAYERS, HIDDEN, NUM_STEPS = 16, 8, 128, 4, 32, 2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
# 0.16 on: recompute that throws outputs away and fills their storage again.
OUTPUTS = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_aux_loss_coeff": 0.0}
ALLTOALL = {**MOE, "moe_token_dispatcher_type": "alltoall"}
ALLGATHER = {**MOE, "moe_token_dispatcher_type": "allgather"}

CASES: dict[str, Case] = {
    "dense": {},
    "dense-eight": {"batch": 8},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-sp-dp2": {"tp": 2, "config": {"sequence_parallel": True}},
    "tp2-sp-rms-norm": {"tp": 2, "config": {"sequence_parallel": True, "normalization": "RMSNorm"}},
    "dp4-distributed-optimizer": {"shard": True},
    "dp4-distributed-optimizer-overlapped": {"shard": True, "overlap": True},
    "pp2-vpp2-dp2": {"pp": 2, "vpp": 2},
    "pp2-vpp2-dp2-groups-of-4": {"pp": 2, "vpp": 2, "batch": 8, "config": {"microbatch_group_size_per_vp_stage": 4}},
    "tp2-pp2-full-recompute": {"tp": 2, "pp": 2, "config": FULL},
    "tp2-selective-recompute": {"tp": 2, "config": SELECTIVE},
    "tp2-sp-output-recompute": {"tp": 2, "config": {**OUTPUTS, "sequence_parallel": True}, "since": (0, 13)},
    "tp2-pp2-tied": {"tp": 2, "pp": 2, "tied": True},
    "dense-tied": {"tied": True},
    "dense-rms-norm": {"config": {"normalization": "RMSNorm"}},
    "bf16": {"bf16": True},
    "bf16-tp2-pp2-distributed-optimizer": {"tp": 2, "pp": 2, "bf16": True, "shard": True},
    "moe": {"experts": 4, "config": ALLTOALL},
    "moe-ep2-pp2-alltoall": {"ep": 2, "pp": 2, "experts": 4, "config": ALLTOALL},
    "moe-ep2-tp2-sp-allgather": {"ep": 2, "tp": 2, "experts": 4, "config": {**ALLGATHER, "sequence_parallel": True}},
    # Whole experts on tensor ranks: twice as many expert ranks as any other layout of TP2 DP2 has room for.
    "moe-ep4-tp2-etp1-alltoall": {
        "ep": 4,
        "tp": 2,
        "etp": 1,
        "experts": 4,
        "config": {**ALLTOALL, "sequence_parallel": True},
    },
    "moe-ep2-tp2-etp1-pp2": {
        "ep": 2,
        "tp": 2,
        "etp": 1,
        "pp": 2,
        "experts": 4,
        "config": {**ALLTOALL, "sequence_parallel": True},
    },
    "rope": {"rope": True},
    "packed-rope": {"packed": True, "rope": True},
    "packed-tp2-sp-dp2": {"tp": 2, "packed": True, "config": {"sequence_parallel": True}},
    "packed-pp2-recompute": {"pp": 2, "packed": True, "config": FULL},
    "packed-cp2-tp2": {"cp": 2, "tp": 2, "packed": True},
    # 0.12 saves with a private function of torch that has changed since.
    "checkpoint": {"pp": 2, "tp": 2, "checkpoint": True, "since": (0, 13)},
}


def run_case(case: Case) -> dict[str, Any] | None:
    """Losses and gradient norms of a few steps; None where the release has not got what the case needs."""
    release = (package_info.MAJOR, package_info.MINOR)
    if release < case.get("since", (0, 0)):
        return None
    losses, norms = [], []
    with _groups(case):
        config, chunks, optimizer = _build(case)
        if case.get("checkpoint"):
            return _change_layout(chunks[0])
        for step in range(NUM_STEPS):
            loss, norm = _train_step(case, config, chunks, optimizer, step)
            losses.append(loss)
            norms.append(norm)
    return {"losses": losses, "norms": norms}


class _groups:  # noqa: N801  # a context
    def __init__(self, case: Case) -> None:
        self.case = case

    def __enter__(self) -> None:
        ps.initialize_model_parallel(
            self.case.get("tp", 1),
            self.case.get("pp", 1),
            self.case.get("vpp"),
            context_parallel_size=self.case.get("cp", 1),
            expert_model_parallel_size=self.case.get("ep", 1),
            expert_tensor_parallel_size=self.case.get("etp"),
        )
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1234)

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            return
        dist.barrier()
        ps.destroy_model_parallel()
        for name in vars(ps):
            if name.endswith("_GLOBAL_RANKS"):
                setattr(ps, name, None)  # 0.12 forgets these
        # Megatron drops its groups without ending them: their threads would take more time with every case.
        for group in [group for group in dist.distributed_c10d._world.pg_map if group != dist.group.WORLD]:
            dist.destroy_process_group(group)


def _build(case: Case) -> tuple[Any, list[Any], Any]:
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    virtual = case.get("vpp")
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        context_parallel_size=case.get("cp", 1),
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("etp"),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=bool(case.get("bf16")),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **case.get("config", {}),
    )
    if virtual:
        # With batched communication this is silently wrong; megatron.training never allows it.
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    modules = [_chunk(case, config, index) for index in range(virtual or 1)]
    if virtual:
        ps.set_virtual_pipeline_model_parallel_rank(0)
    shard = case.get("shard", False)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=shard,
        overlap_grad_reduce=case.get("overlap", False),
        overlap_param_gather=case.get("overlap", False),
    )
    if case.get("bf16"):
        modules = [Float16Module(config, module) for module in modules]
    chunks = [DistributedDataParallel(config=config, ddp_config=ddp, module=module) for module in modules]
    config.finalize_model_grads_func = finalize_model_grads
    if case.get("overlap"):
        config.no_sync_func = chunks[0].no_sync
        config.grad_sync_func, config.param_sync_func = chunks[0].start_grad_sync, chunks[0].start_param_sync
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=shard, bf16=bool(case.get("bf16")), params_dtype=dtype
    )
    if hasattr(settings, "overlap_param_gather"):
        settings.overlap_param_gather = case.get("overlap", False)
    optimizer = get_megatron_optimizer(settings, chunks)
    config.grad_scale_func = optimizer.scale_loss
    return config, chunks, optimizer


def _chunk(case: Case, config: Any, index: int) -> Any:
    virtual, options = case.get("vpp"), {}
    if virtual:
        ps.set_virtual_pipeline_model_parallel_rank(index)
    if "vp_stage" in inspect.signature(GPTModel.__init__).parameters:
        options["vp_stage"] = index if virtual else None

    def ends(function: Any) -> bool:
        known = inspect.signature(function).parameters
        chosen = {"ignore_virtual": False, "vp_stage": index} if virtual else {}
        return bool(function(**{name: value for name, value in chosen.items() if name in known}))

    spec = get_gpt_layer_local_spec(
        num_experts=case.get("experts"), moe_grouped_gemm=False, normalization=config.normalization
    )
    if case.get("cp", 1) > 1:
        from mindspeed_autoparallel.runtime.attention.context_parallel import use_in_spec

        spec = use_in_spec(spec)  # the attention of the local spec refuses context parallelism
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=ends(ps.is_pipeline_first_stage),
        post_process=ends(ps.is_pipeline_last_stage),
        share_embeddings_and_output_weights=bool(case.get("tied")),
        position_embedding_type="rope" if case.get("rope") else "learned_absolute",
        **options,
    )
    for name, parameter in model.named_parameters():
        _fill(case, model, name, parameter)
    return model


def _fill(case: Case, model: Any, name: str, parameter: Any) -> None:
    layer = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if layer:
        name = f"{model.decoder.layers[int(layer.group(1))].layer_number}.{layer.group(2)}"
    expert = re.search(r"local_experts\.(\d+)\.", name)
    if expert:
        per_rank = case["experts"] // case.get("ep", 1)
        number = int(expert.group(1)) + per_rank * ps.get_expert_model_parallel_rank()
        name = name.replace(expert.group(0), f"experts.{number}.")
    if case.get("tied") and name.startswith("output_layer"):
        name = "embedding.word_embeddings.weight"
    generator = torch.Generator().manual_seed(int(hashlib.md5(name.encode()).hexdigest()[:8], 16))
    shape, axis, size, rank = list(parameter.shape), -1, 1, 0
    if getattr(parameter, "tensor_model_parallel", False):
        axis = parameter.partition_dim
        size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
        if expert:
            size, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
        shape[axis] *= size
    if len(shape) > 1:
        full = torch.randn(shape, generator=generator) * 0.05
    else:
        full = torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)
    with torch.no_grad():
        parameter.copy_(full.chunk(size, axis)[rank] if axis >= 0 else full)


def _own_positions(device: Any = None) -> torch.Tensor:
    """Positions of the tokens this rank computes, ``[1, tokens]``: Megatron's zigzag of 2 x CP chunks."""
    size, rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
    chunks = torch.arange(SEQUENCE, device=device).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[-1 - rank]))[None]


def _microbatches(step: int, batch: int) -> Any:
    own = _own_positions()[0]
    for index in range(ps.get_data_parallel_rank(), batch, ps.get_data_parallel_world_size()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=generator)
        yield tokens[:, own].cuda(), tokens[:, own + 1].cuda()


def _packed_microbatches(step: int, batch: int) -> Any:
    """Pairs of the microbatches, one sequence after the other in one row."""
    iterator = _microbatches(step, batch)
    for (tokens, labels), (more_tokens, more_labels) in zip(iterator, iterator, strict=True):
        yield torch.cat((tokens, more_tokens), 1), torch.cat((labels, more_labels), 1)


def _packed_step(iterator: Any, model: Any) -> Any:
    tokens, labels = next(iterator)
    ends = torch.tensor([0, SEQUENCE, 2 * SEQUENCE], dtype=torch.int32).cuda()
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=SEQUENCE, max_seqlen_kv=SEQUENCE
    )
    positions = _own_positions("cuda").repeat(1, 2)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=packed)

    def reduce(output: Any) -> Any:
        loss = output.float().sum() / (2 * SEQUENCE)
        return loss, {"loss": loss.detach().clone()}

    return losses, reduce


def _forward_step(iterator: Any, model: Any) -> Any:
    tokens, labels = next(iterator)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, device=torch.cuda.current_device()), 1).bool()
    losses = model(tokens, _own_positions("cuda"), mask, labels=labels)

    def reduce(output: Any) -> Any:
        loss = output.float().sum() / SEQUENCE  # of the own tokens; the schedule expects the share of the sequence
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    return losses, reduce


def _train_step(case: Case, config: Any, chunks: list[Any], optimizer: Any, step: int) -> tuple[float | None, float]:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    size, batch = ps.get_data_parallel_world_size(), case.get("batch", BATCH)
    packed = bool(case.get("packed"))
    iterators = [(_packed_microbatches if packed else _microbatches)(step, batch) for _ in chunks]
    several = len(chunks) > 1
    reports = get_forward_backward_func()(
        forward_step_func=_packed_step if packed else _forward_step,
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=batch // size // (1 + packed),
        seq_length=SEQUENCE * (1 + packed),
        micro_batch_size=1,
        decoder_seq_length=SEQUENCE * (1 + packed),
        forward_only=False,
    )
    loss = None
    if reports:
        total = torch.stack([report["loss"] for report in reports]).mean()
        dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=True))
        loss = float(total) / size
    _, norm, _ = optimizer.step()
    return loss, float(norm)


def _change_layout(written: Any) -> dict[str, Any]:
    """Save a torch_dist checkpoint, load it into the data-parallel layout: every parameter as it was built."""
    folder: list[Any] = [tempfile.mkdtemp(dir=".") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = folder[0]
    dist_checkpointing.save(written.module.sharded_state_dict(), path)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    _, (read,), _ = _build({})
    right = {name: parameter.detach().clone() for name, parameter in read.module.named_parameters()}
    with torch.no_grad():
        for parameter in read.module.parameters():
            parameter.zero_()
    read.module.load_state_dict(dist_checkpointing.load(read.module.sharded_state_dict(), path))
    equal = [name for name, parameter in read.module.named_parameters() if torch.equal(parameter, right[name])]
    return {"num_equal": len(equal), "num_parameters": len(right)}


def main() -> None:
    if WITHOUT_PLUGIN:
        bare_cpu.settle()
        assert not [name for name in sys.modules if name.startswith("mindspeed_autoparallel")]
    dist.init_process_group("gloo" if WITHOUT_PLUGIN else "nccl")
    results = {
        name: run_case({"batch": 4, **CASES[name]} if name in CASES else json.loads(name)) for name in sys.argv[1:]
    }
    print("RESULT " + json.dumps({"release": package_info.__version__, "cases": results}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
