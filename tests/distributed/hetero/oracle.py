"""Run under torchrun: trains the tiny host in many layouts and writes losses, gradients, norms and weights per step.

    oracle.py OUT CASES.json [HOST]      every rank runs every case; rank 0 writes OUT/<name>.pt
HOST: the module of this folder that holds the model and its data, ``host`` by default.
A case without "encoder" is the reference: no hetero parallel at all, one process, Megatron's own calls.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import sys
import types
from pathlib import Path

import bare_cpu
import torch
import torch.distributed as dist

bare_cpu.install()
torch.set_num_threads(1)

host = importlib.import_module(sys.argv[3] if len(sys.argv) > 3 else "host")

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from redistribution_volume import generator_bytes, received_bytes  # noqa: E402

from mindspeed_autoparallel.runtime.hetero import encode, generators, macrobatches, modules, phases  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.exchange import BytesMoved  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.optimizer import build_optimizer  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.rng import ModuleRandomStates  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.session import open_session  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.states import GroupMemo, ModuleStates  # noqa: E402

bare_cpu.settle()
LAYERS, SAMPLES, MICRO_BATCH = 4, 16, 2


def initialize(tp=1, pp=1, cp=1, vp=None, tied=True):
    """``tied``: a weight may be shared between the first and the last stage, as Megatron expects of a model."""
    alone = lambda ranks, *unused: ranks[:1]
    mpu.initialize_model_parallel(
        **({} if tied else {"get_embedding_ranks": alone, "get_position_embedding_ranks": alone}),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=vp,
    )


def make_encoder(case, cfg):
    encoder = host.ImageEncoder(cfg).to(cfg.params_dtype)
    host.fill(
        encoder,
        tensor=cfg.tensor_model_parallel_size,
        rank=mpu.get_tensor_model_parallel_rank(),
        prefix="image_encoder.",
    )
    encoder.requires_grad_(not case.get("frozen", False))
    return encoder


def make_generator(cfg):
    generator = host.ImageGenerator(cfg).to(cfg.params_dtype)
    rank = mpu.get_tensor_model_parallel_rank()
    host.fill(generator, tensor=cfg.tensor_model_parallel_size, rank=rank, prefix="image_generator.")
    return generator


def make_chunks(case, cfg, encoder, generator):
    """The host's model chunks on this rank; encoder and generator hang on the first."""
    vp = cfg.virtual_pipeline_model_parallel_size
    chunks = []
    for v in range(vp or 1):
        if vp:
            mpu.set_virtual_pipeline_model_parallel_rank(v)
        last = cfg.pipeline_model_parallel_size * (vp or 1) - 1
        position = mpu.get_pipeline_model_parallel_rank() + v * cfg.pipeline_model_parallel_size
        chunk = host.VisionLanguageModel(
            encoder if v == 0 else None,
            cfg,
            pre=position == 0,
            post=position == last,
            vp_stage=v if vp and "vp_stage" in GPTModel.__init__.__code__.co_varnames else None,
            **({} if generator is None else {"generator": generator}),
        ).to(cfg.params_dtype)
        chunk.model_type = ModelType.encoder_or_decoder
        per = LAYERS // (last + 1)
        host.fill(
            chunk.text_decoder,
            tensor=cfg.tensor_model_parallel_size,
            rank=mpu.get_tensor_model_parallel_rank(),
            layer_offset=position * per,
            prefix="text_decoder.",
        )
        chunks.append(chunk)
    return chunks


def finish_config(cfg):
    cfg.finalize_model_grads_func = lambda model, tokens=None, **kw: finalize_model_grads(model, tokens)
    cfg.timers = cfg.grad_scale_func = cfg.no_sync_func = None


def optimizer_config(case):
    return OptimizerConfig(
        optimizer=case.get("optimizer", "adam"),
        lr=1e-2,
        weight_decay=0.01,
        clip_grad=1.0,
        adam_eps=1e-4,
        use_distributed_optimizer=case.get("distributed_optimizer", False),
        params_dtype=getattr(torch, case.get("dtype", "float32")),
        bf16=False,
    )


def gathered(modules_and_states, states, what):
    """Every tensor of every module, whole, and how far copies are apart; on rank 0.

    Tensor shards are concatenated, and all ranks' copies are compared. Arrays travel: tensors take ten times as long.
    """
    mine = {}
    for name, module in modules_and_states:
        with states.use(name) if states else torch.no_grad():
            group, size = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
            for parameter in module.parameters():
                key = getattr(parameter, "global_name", None)
                value = what(parameter)
                if key is None or value is None or key in mine:
                    continue
                dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1
                if dim >= 0 and size > 1:
                    parts = [torch.empty_like(value) for _ in range(size)]
                    dist.all_gather(parts, value.contiguous(), group=group)
                    value = torch.cat(parts, dim)
                mine[key] = value.detach().numpy()
    everyone = [None] * dist.get_world_size()
    dist.gather_object(mine, everyone if dist.get_rank() == 0 else None)
    whole, spread = {}, 0.0
    for arrays in filter(None, everyone):
        for key, value in arrays.items():
            if key in whole:
                spread = max(spread, float(abs(whole[key] - value).max()))
            whole.setdefault(key, value)
    return {key: torch.from_numpy(value) for key, value in whole.items()}, spread


def train(case, groups):
    with bytes_by_formula(getattr(torch, case.get("dtype", "float32"))) as planned:
        return train_counting(case, planned, groups)


def train_counting(case, planned, groups):
    world = dist.get_world_size()
    hetero = "encoder" in case
    e, b = case.get("encoder", {}), case.get("backbone", {})
    dtype = getattr(torch, case.get("dtype", "float32"))
    per_token = case.get("per_token", False)
    make = functools.partial(
        host.config,
        LAYERS,
        per_token=per_token,
        recompute=case.get("recompute"),
        dtype=dtype,
        dropout=case.get("dropout", 0.0),
    )
    encoder_cfg = host.config(
        LAYERS,
        tensor=e.get("tp", 1),
        pipeline=e.get("pp", 1),
        context=e.get("cp", 1),
        dtype=dtype,
        dropout=case.get("dropout", 0.0),
    )
    g = case.get("generator")
    generator, generator_part = None, None
    generator_cfg = host.config(LAYERS, tensor=g.get("tp", 1), dtype=dtype) if g is not None else None
    cfg = make(
        tensor=b.get("tp", 1),
        pipeline=b.get("pp", 1),
        context=b.get("cp", 1),
        virtual=b.get("vp"),
        sequence=case.get("sp", False),
    )
    finish_config(cfg)
    states = ModuleStates(mpu, groups)
    initialize_backbone = functools.partial(initialize, **b)
    if hetero:
        with groups.installed(mpu):
            initialize_backbone()
        states.adopt("backbone")
        states.build("image_encoder", functools.partial(initialize, **e, tied=False))
        if g is not None:
            states.build("image_generator", functools.partial(initialize, **g, tied=False))
        ModuleRandomStates(states).seed(7)
        with states.use("image_encoder"):
            encoder = make_encoder(case, encoder_cfg)
        if g is not None:
            with states.use("image_generator"):
                generator = make_generator(generator_cfg)
    else:
        initialize_backbone()
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        encoder = make_encoder(case, encoder_cfg)
        generator = make_generator(generator_cfg) if g is not None else None
    chunks = make_chunks(case, cfg, encoder, generator)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=False, use_distributed_optimizer=case.get("distributed_optimizer", False)
    )
    wrap = lambda chunk: DistributedDataParallel(cfg, ddp_config, chunk)
    opt_config = optimizer_config(case)
    if hetero:
        part = modules.Encoder(
            "image_encoder", encoder, host.ImageAdapter(dtype, encoder), case.get("scale", 1), encoder_cfg
        )
        parts = [part]
        if generator is not None:
            adapter = host.GeneratorAdapter(dtype, generator)
            generator_part = modules.Encoder("image_generator", generator, adapter, 1, generator_cfg)
            parts.append(generator_part)
        if case.get("one_ddp"):
            models = [wrap(chunk) for chunk in chunks]
            optimizer = get_megatron_optimizer(opt_config, models)
        else:
            with modules.frozen(parts):
                models = [wrap(chunk) for chunk in chunks]
            for one in parts:
                # Several buckets, so that ranks could start them in different orders.
                own = dataclasses.replace(ddp_config, overlap_grad_reduce=case.get("overlap", False), bucket_size=4000)
                modules.build_ddp(states, one, own, may_overlap=one is part)
            optimizer = build_optimizer(
                states, "backbone", parts, lambda m: get_megatron_optimizer(opt_config, m), models
            )
        session = open_session(
            states,
            "backbone",
            [part],
            balance=case.get("balance", "local"),
            memory=case.get("memory", "upfront"),
            sequence_parallel=cfg.sequence_parallel,
            generators=parts[1:],
        )
        schedule = functools.partial(phases.run, session)
    else:
        models = [wrap(chunk) for chunk in chunks]
        optimizer = get_megatron_optimizer(opt_config, models)
        part, session = None, None
        schedule = lambda f, **kw: f(**kw)
    for model in models:
        model.model_type = ModelType.encoder_or_decoder
    replicas, replica = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    num_microbatches = SAMPLES // (MICRO_BATCH * replicas)
    data = host.samples(SAMPLES, case.get("text_only", ()))
    for sample in data:
        sample["pixels"] = sample["pixels"].to(dtype)
    record = {"loss": [], "norm": [], "gradients": [], "weights": [], "spread": 0.0, "world": world}
    named = [("image_encoder", encoder), ("backbone", torch.nn.ModuleList([c.text_decoder for c in chunks]))]
    if generator is not None:
        named.append(("image_generator", generator))
    use = states if hetero else None
    for _ in range(case.get("steps", 1)):
        losses = []
        for model in models:
            model.zero_grad_buffer()
        for one in (part, generator_part):
            if one is not None and one.ddp is not None:
                one.ddp.zero_grad_buffer()
        optimizer.zero_grad()

        def iterator():
            if case.get("first_tensor_rank_holds") and mpu.get_tensor_model_parallel_rank() != 0:
                return None
            return host.batches(data, num_microbatches, MICRO_BATCH, replica, replicas)

        iterators = [iterator() for _ in models]
        common = {
            "forward_step_func": broadcasting(host.forward_step(losses, per_token), case),
            "model": models,
            "data_iterator": iterators if len(models) > 1 else iterators[0],
            "num_microbatches": num_microbatches,
            "seq_length": host.SEQUENCE,
            "micro_batch_size": MICRO_BATCH,
        }
        evaluated = []
        if case.get("evaluate"):
            losses_before, common["forward_step_func"] = losses, broadcasting(host.forward_step(evaluated), case)
            with torch.no_grad():
                schedule(get_forward_backward_func(), **common, forward_only=True)
            losses = losses_before
            iterators = [iterator() for _ in models]
            common["forward_step_func"] = broadcasting(host.forward_step(losses, per_token), case)
            common["data_iterator"] = iterators if len(models) > 1 else iterators[0]
        schedule(get_forward_backward_func(), **common, forward_only=False)
        if case.get("mean_over_encoder") and part is not None:
            encoder_replicas = world // (e.get("tp", 1) * e.get("cp", 1))
            part.ddp.scale_gradients(replicas / encoder_replicas)
        everyone = [None] * world
        dist.all_gather_object(everyone, losses if mpu.get_tensor_model_parallel_rank() == 0 else [])
        record["loss"].append(sum(sum(found) for found in everyone) / (SAMPLES // MICRO_BATCH))
        if not (case.get("distributed_optimizer") or record["weights"]):
            # Of the first step: later ones show in the weights.
            gradients, spread = gathered(named, use, lambda p: getattr(p, "main_grad", None))
            record["gradients"].append(gradients)
            record["spread"] = max(record["spread"], spread)
        # Megatron clips fp32 gradients only: in double precision the gradients are compared, nothing is stepped.
        norm = 1.0 if dtype == torch.float64 else optimizer.step()[1]
        record["norm"].append(float(norm))
        weights, spread = gathered(named, use, lambda p: p.data)
        record["weights"].append(weights)
        record["spread"] = max(record["spread"], spread)
    if session is not None:
        moved, times = BytesMoved(), session.times
        for comm in session.comms:
            for kind, size in vars(comm.exchange.moved).items():
                setattr(moved, kind, getattr(moved, kind) + size)
        counts = [None] * world
        dist.all_gather_object(counts, (vars(moved), vars(planned)))
        record["moved"], record["planned"] = [c for c, _ in counts], [c for _, c in counts]
        reduction = part.reduction
        starts = [None] * world
        dist.all_gather_object(starts, reduction and (reduction.num_by_hooks, reduction.num_in_all))
        record["starts"] = starts
        record["times"] = dict(vars(times))
        record["groups"] = (states.groups.num_requested, states.groups.num_created)
    everyone = [None] * world
    dist.all_gather_object(everyone, evaluated if mpu.get_tensor_model_parallel_rank() == 0 else [])
    record["evaluated"] = sum(sum(found) for found in everyone) / (SAMPLES // MICRO_BATCH)
    return record


@contextlib.contextmanager
def bytes_by_formula(dtype):
    """What every plan inside the block says this rank receives, by the volume formula."""
    size, total, make = torch.empty(0, dtype=dtype).element_size(), BytesMoved(), macrobatches.make_plan

    def counting(*args, **kwargs):
        plan = make(*args, **kwargs)
        for kind, width in (("inputs", host.PATCH), ("outputs", host.HIDDEN), ("gradients", host.HIDDEN)):
            received = received_bytes(getattr(plan, kind), dist.get_rank(), width * size)
            setattr(total, kind, getattr(total, kind) + received)
        return plan

    plans = generators.GeneratorStep._plans

    def counting_generator(self, items):
        found = plans(self, items)
        sizes = {"target_row_bytes": host.PATCH * size, "row_bytes": host.HIDDEN * size}
        trains = not self.forward_only
        for kind, received in generator_bytes(
            found.rows, found.losses, dist.get_rank(), **sizes, trains=trains
        ).items():
            setattr(total, kind, getattr(total, kind) + received)
        return found

    macrobatches.make_plan, generators.GeneratorStep._plans = counting, counting_generator
    try:
        yield total
    finally:
        macrobatches.make_plan, generators.GeneratorStep._plans = make, plans


def broadcasting(step, case):
    """With ``first_tensor_rank_holds`` only tensor rank 0 reads and tells the others, as Megatron's scripts do."""
    if not case.get("first_tensor_rank_holds"):
        return step

    def told(iterator, model):
        box = [next(iterator) if iterator is not None else None]
        group = mpu.get_tensor_model_parallel_group()
        dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[0], group=group)
        return step(iter(box), model)

    return told


@contextlib.contextmanager
def backward_in_the_wrong_state():
    """A negative control: the encoder's backward does not switch to its own state."""
    right = encode.MacroBatch.finish_backward

    def backward(self):
        nothing = lambda name: contextlib.nullcontext()
        states, self._states = self._states, types.SimpleNamespace(computing=nothing)
        right(self)
        self._states = states

    encode.MacroBatch.finish_backward = backward
    try:
        yield
    finally:
        encode.MacroBatch.finish_backward = right


def main():
    out, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    dist.init_process_group("gloo")
    pristine = {k: copy.copy(v) if isinstance(v, (list, dict)) else v for k, v in vars(mpu).items() if k[0] == "_"}
    # One memo for all cases: every gloo group has threads of its own.
    groups = GroupMemo()
    for case in cases:
        vars(mpu).update({k: copy.copy(v) if isinstance(v, (list, dict)) else v for k, v in pristine.items()})
        with backward_in_the_wrong_state() if case.get("wrong_backward") else contextlib.nullcontext():
            record = train(case, groups)
        if dist.get_rank() == 0:
            torch.save(record, out / f"{case['name']}.pt")
    dist.barrier()
    dist.destroy_process_group()


main()
