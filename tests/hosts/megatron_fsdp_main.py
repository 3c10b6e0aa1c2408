"""Trains Megatron-LM's GPT under Megatron-FSDP on forked CPU ranks: ``megatron_fsdp_main.py CHECKOUT FOLDER``, JSON lines out.

The checkout is first on PYTHONPATH. A line for each of ``RUNS``: losses, sizes of the buckets, and what rank 0 does in the
second step, with the most bytes of buckets that are allocated at once. G: a gather begins, W: computing waits for one, F and B: a module's forward or backward begins, R: a reduction
begins, RW: computing waits for so many, X: a bucket is freed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import megatron_cells as cells
from forked_host import import_megatron, run_ranks

RECORDED = """
    import json

    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp
    from megatron.training import training as loop

    events = []
    gathers, reductions, status = fsdp.AllGatherPipeline, fsdp.GradReducePipeline, fsdp.BucketStatus

    def recorded(owner, name, note):
        inner = getattr(owner, name)

        def call(self, *args, **kwargs):
            before = note(self, *args, **kwargs)
            result = inner(self, *args, **kwargs)
            if callable(before):
                before()
            return result

        setattr(owner, name, call)

    def gather(self, bucket_id, bwd):
        if self.bucket_status[self.get_bucket_key(bucket_id, bwd)] in (status.EMPTY, status.PRESERVED):
            events.append(["G", bucket_id])

    def wait(self, bucket_id, bwd, empty_ok=False):
        if self.bucket_status[self.get_bucket_key(bucket_id, bwd)] == status.COMMUNICATING:
            events.append(["W", bucket_id])

    def free(self, bucket_id, bwd, lazy=False):
        key = self.get_bucket_key(bucket_id, bwd)
        held = self.bucket_status[key] != status.EMPTY
        return lambda: held and self.bucket_status[key] == status.EMPTY and events.append(["X", bucket_id])

    def wait_for_reductions(self, *args, **kwargs):
        before = len(self.grad_reduce_queue)
        done = lambda: before - len(self.grad_reduce_queue)
        return lambda: done() and events.append(["RW", done()])

    live, peaks = {}, [0]

    def allocated(self, bucket_id, size, dtype, **_):
        live[id(self), bucket_id] = size * dtype.itemsize
        peaks.append(max(peaks.pop(), sum(live.values())))

    for allocator in (fsdp.TemporaryBucketAllocator, fsdp.StorageResizeBasedBucketAllocator):
        recorded(allocator, "allocate", allocated)
        recorded(allocator, "free", lambda self, bucket_id: live.pop((id(self), bucket_id), None) and None)
    recorded(gathers, "async_bucket_gather", gather)
    recorded(gathers, "wait_bucket_ready", wait)
    recorded(gathers, "release_bucket", free)
    recorded(reductions, "_bucket_group_gradient_reduce", lambda self, group, **_: events.append(["R", *group]))
    recorded(reductions, "wait_for_previous_grad_reduce", wait_for_reductions)
    make_optimizer = loop.get_megatron_optimizer

    def follow(module, name):
        def passed(module, inputs, output):
            first = output[0] if isinstance(output, tuple) else output
            if torch.is_tensor(first) and first.requires_grad:
                first.register_hook(lambda gradient: events.append(["B", name]))

        module.register_forward_pre_hook(lambda module, inputs: events.append(["F", name]))
        module.register_forward_hook(passed)

    def with_hooks(config, chunks, *args, **kwargs):
        model = chunks[0]
        while not hasattr(model, "all_gather_pipeline"):
            model = model.module
        print("buckets", json.dumps([group.model_weight_buffer.bucket_index.size for group in model.param_and_grad_buffer.parameter_groups]))
        for name, module in model.module.named_modules():
            name = name.rpartition(".")[2]
            if name in ("embedding", "final_layernorm", "output_layer") or name.isdigit():
                follow(module, name)
        optimizer = make_optimizer(config, chunks, *args, **kwargs)
        step = optimizer.step

        def printed(*args, **kwargs):
            print("events", json.dumps(events), flush=True)
            print("peak", peaks.pop(), flush=True)
            peaks.append(sum(live.values()))
            events.clear()
            return step(*args, **kwargs)

        optimizer.step = printed
        return optimizer

    loop.get_megatron_optimizer = with_hooks
"""
SHARDED = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer "
    "--ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather --no-gradient-reduce-div-fusion"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
UNIT = "--suggested-communication-unit-size 100000"
BLOCK = RECOMPUTED.replace("uniform", "block")
TWICE = "--global-batch-size 4"
RUNS = {
    "alone": "",
    "whole": SHARDED,
    "small": f"{SHARDED} {UNIT}",
    "recomputed": f"{SHARDED} {UNIT} {RECOMPUTED}",
    "block": f"{SHARDED} {UNIT} {BLOCK}",
    "split": f"{SHARDED} {UNIT} --ddp-bucket-size 3000",
    "alone accumulated": TWICE,
    "accumulated": f"{SHARDED} {UNIT} {BLOCK} {TWICE}",
}


def main() -> None:
    """Train all of ``RUNS``."""
    checkout, folder = map(Path, sys.argv[1:])
    import_megatron()
    host = cells.Host(sources=checkout, folder=folder)
    script = host.script("dense")
    plain = script.read_text().replace("    import same_start\n\n    same_start.install()\n", "    pass\n")
    flags = [word for word in host.flags("dense") if word != "--use-distributed-optimizer"]
    flags += ["--global-batch-size", "2", "--train-iters", "2"]
    for name, words in RUNS.items():
        is_sharded = SHARDED in words
        script.write_text(plain.replace("    pass\n", RECORDED, 1) if is_sharded else plain)
        world = 2 if is_sharded else 1
        ran = run_ranks(script, [*flags, *words.split()], world, folder, CUDA_DEVICE_MAX_CONNECTIONS="8")
        assert ran.exit_code == 0, ran.output[-3000:]
        printed = dict.fromkeys(("buckets", "events", "peak"), "[]")
        for line in (folder / "rank0.log").read_text().splitlines():
            word, _, text = line.partition(" ")
            printed |= {word: text} if word in printed else {}
        figures = {key: json.loads(text) for key, text in printed.items()}
        print(json.dumps({"name": name, "losses": ran.losses, **figures}), flush=True)


if __name__ == "__main__":
    main()
