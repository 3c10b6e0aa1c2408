"""Let FSDP2 trainers for accelerators run on CPU processes with gloo; first on PYTHONPATH, nothing of theirs is edited.

Before such a trainer's package is imported, ``torch.cuda`` means the CPU (the package's own adapter). Each function below changes one module
when that has been imported: most print losses and gradient norms with all their digits.
"""

import functools
import importlib.abc
import importlib.util
import sys

TRAINERS = ("nemo_automodel", "veomni", "verl", "mindspeed_llm")
CHANGES = {}


def changes(name):
    def register(function):
        CHANGES[name] = function
        return function

    return register


class ChangingFinder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.seen = set()

    def find_spec(self, name, path=None, target=None):
        if name not in (*TRAINERS, *CHANGES) or name in self.seen:
            return None
        self.seen.add(name)
        if name in TRAINERS:
            use_cpu()
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = execute_and_change
        return spec


def use_cpu():
    import torch
    from torch.distributed import device_mesh

    from mindspeed_autoparallel.runtime.devices.cpu.adapter import CpuAdapter

    CpuAdapter().prepare()
    device_mesh.new_group = torch.distributed.new_group  # torch 2.7 makes a group of NCCL there
    if torch.cpu.Stream().record_event() is None:
        torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()  # replicas under torch 2.7 require one
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cuda")


def print_figures(step, loss, norm):
    print(f"exact {step} {float(loss)!r} {float(norm)!r}", flush=True)


@changes("veomni.trainer.base")
def veomni(module):
    """Each rank prints the loss of its own samples."""
    end = module.BaseTrainer.on_step_end

    @functools.wraps(end)
    def with_digits(self, loss=None, loss_dict=None, grad_norm=None):
        print_figures(self.state.global_step, loss, grad_norm)
        return end(self, loss=loss, loss_dict=loss_dict, grad_norm=grad_norm)

    module.BaseTrainer.on_step_end = with_digits


@changes("veomni.ops.kernels.attention.flash")
def veomni_attention(module):
    """The samples of a micro batch are one sequence, over which kernels of accelerators attend sample by sample."""
    import itertools
    import types

    import torch

    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)

    def by_sample(query, key, value, mask, *, cu_seq_lens_q, is_causal, softmax_scale, **_):
        done = [
            attend(
                *(one[:, begin:end].transpose(1, 2) for one in (query, key, value)),
                is_causal=is_causal,
                scale=softmax_scale,
            ).transpose(1, 2)
            for begin, end in itertools.pairwise(cu_seq_lens_q.tolist())
        ]
        return torch.cat(done, 1)

    module._flash_attention_forward = by_sample
    kernels = types.SimpleNamespace(flash_attn_func=by_sample, flash_attn_varlen_func=by_sample)
    module._load_veomni_local_flash_kernel = lambda implementation: kernels


@changes("mindspeed_llm.fsdp2.utils.train_monitor")
def mindspeed_llm(module):
    """The trainer sums over ranks: losses are shares of the whole batch, but each rank has the whole norm."""
    import torch

    step = module.TrainMonitor.step

    @functools.wraps(step)
    def with_digits(self, *args, **kwargs):
        print_figures(args[7], args[9] - args[10], args[3] / torch.distributed.get_world_size())
        return step(self, *args, **kwargs)

    module.TrainMonitor.step = with_digits


@changes("verl.utils.distributed")
def verl_groups(module):
    """Its process group is made with NCCL, and gloo of torch 2.7 has no mean: a sum of gradients takes its place."""
    import inspect

    import torch.distributed as dist

    def with_mean(reduce):
        signature = inspect.signature(reduce)

        @functools.wraps(reduce)
        def run(*args, **kwargs):
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["op"] != dist.ReduceOp.AVG:
                return reduce(*args, **kwargs)
            call.arguments.update(op=dist.ReduceOp.SUM, async_op=False)
            reduce(*call.args, **call.kwargs)
            call.args[0].div_(dist.get_world_size(call.arguments["group"]))
            return None

        return run

    module.get_nccl_backend = lambda: "gloo"
    dist.all_reduce, dist.reduce_scatter_tensor = map(with_mean, (dist.all_reduce, dist.reduce_scatter_tensor))


@changes("verl.workers.engine.fsdp.transformer_impl")
def verl_precision(module):
    """Its engine opens an autocast to bf16 around every forward, whatever types its file has."""
    module.torch.autocast = functools.partial(module.torch.autocast, enabled=False)


@changes("verl.utils.tracking")
def verl(module):
    """The first rank prints the mean loss of all."""
    log = module.Tracking.log

    @functools.wraps(log)
    def with_digits(self, data, step, *args, **kwargs):
        if "train/loss" in data:
            print_figures(step, data["train/loss"], data["train/grad_norm"])
        return log(self, data, step, *args, **kwargs)

    module.Tracking.log = with_digits


sys.meta_path.insert(0, ChangingFinder())
