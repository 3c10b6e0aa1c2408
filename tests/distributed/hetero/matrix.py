"""Train the reference model for one step in many layouts, in one launch, and compare every gradient with one process.

    matrix.py FOLDER CASES.json      every rank runs every case through Megatron's own pretrain

A case without "text" is one process: it writes FOLDER/<name>.pt with every parameter's gradient and the norm. Another
names the file that it is compared with. Every rank compares the parameters it holds. The result: per case the norm,
the largest relative difference of a gradient and where, and the error where the training ended with one.
"""

import mindspeed_autoparallel  # noqa: F401  # first: before megatron

# isort: split
import argparse
import copy
import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, rerun_state_machine
from megatron.core import parallel_state as mpu
from megatron.training import arguments, ft_integration, global_vars
from megatron.training import training as host
from ranks import leave_with

from mindspeed_autoparallel.runtime import state as process_state
from mindspeed_autoparallel.runtime.hetero import job, states
from mindspeed_autoparallel.runtime.hetero.job import current_job
from reference_vlm import pretrain_vlm
from reference_vlm.model.stack import PlacedBlock

SMALL = 1e-4
"""Of the model's largest gradient: a parameter's whose own is smaller is compared with this."""
GROUPS = states.GroupMemo()
"""One for all cases: every gloo group has threads of its own."""
FLAGS = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))
"""Megatron's, added once for all cases and ranks."""
found = {}


def main():
    folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    dist.init_process_group("gloo")
    pristine = {name: _copied(value) for name, value in vars(mpu).items() if name[0] == "_"}
    states.GroupMemo = lambda: GROUPS
    job.watch_ranks = lambda: None
    arguments.add_megatron_arguments = lambda parser: argparse.ArgumentParser(parents=[FLAGS], allow_abbrev=False)
    ft_integration.setup = lambda: None  # reads the flags again, for a package that is not there
    original = host.setup_model_and_optimizer
    host.setup_model_and_optimizer = lambda *given, **named: _observed(original(*given, **named))
    results = {}
    for case in cases:
        vars(mpu).update({name: _copied(value) for name, value in pristine.items()})
        process_state._INSTANCES.pop(type(current_job()), None)
        global_vars.destroy_global_vars()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        rerun_state_machine.destroy_rerun_state_machine()
        found.clear()
        sys.argv = ["pretrain_vlm.py", *case["arguments"]]
        error = ""
        try:
            with GROUPS.installed(mpu):
                pretrain_vlm.main()
        except SystemExit as refused:
            # In one line, on every rank; anything else ends the launch.
            error = str(refused.__context__ or refused)
        results[case["name"]] = _compared(case, folder, error)
        if dist.get_rank() == 0:
            (folder / "progress.json").write_text(json.dumps(results))
    leave_with(results)


def _copied(value):
    return copy.copy(value) if isinstance(value, list | dict) else value


def _observed(built):
    """Note every gradient, and the norm, when the optimizer steps."""
    model, optimizer, _ = built
    step = optimizer.step

    def noting():
        found["gradients"] = dict(_gradients(model))
        result = step()
        found["norm"] = float(result[1])
        return result

    optimizer.step = noting
    return built


def _gradients(chunks):
    """Yield (name in the whole model, this rank's gradient, dimension that tensor ranks split, their number, own rank,
    whether gate and value lie side by side)."""
    current = current_job()
    ddps = [*chunks, *(one.ddp for one in (*current.encoders, *current.generators) if one.ddp is not None)]
    for ddp in ddps:
        _complete(ddp)
    for chunk in chunks:
        chunk = chunk.module
        chunk = getattr(chunk, "module", chunk)
        first = {name: block.first_layer for name, block in chunk.named_modules() if isinstance(block, PlacedBlock)}
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                continue
            whole = name
            for path, layer in first.items():
                if name.startswith(f"{path}.layers."):
                    number, _, rest = name[len(path) + 8 :].partition(".")
                    whole = f"{path}.layers.{int(number) + layer}.{rest}"
            module = name.split(".")[0]
            size, rank = _tensor(current, module)
            dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1
            gated = module == "text_decoder" and "linear_fc1" in name
            yield whole, (gradient.detach().clone().float(), dim, size, rank, gated)


def _tensor(current, module):
    if current.states is None or module not in current.states.names:
        return mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    with current.states.use(module):
        return mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()


def _complete(ddp):
    """Give every rank the whole gradients where the distributed optimizer left it a part of them."""
    if not ddp.ddp_config.use_distributed_optimizer:
        return
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        size = buffer.data_parallel_world_size
        for bucket in buffer.buckets:
            parts = list(bucket.grad_data.chunk(size))
            own = parts[dist.get_rank(buffer.data_parallel_group)].clone()
            dist.all_gather(parts, own, group=buffer.data_parallel_group)


_loaded = functools.cache(torch.load)


def _compared(case, folder, error):
    if error or "reference" not in case:
        if not error and dist.get_rank() == 0:
            whole = {name: values[0] for name, values in found["gradients"].items()}
            torch.save({"gradients": whole, "norm": found["norm"]}, folder / f"{case['name']}.pt")
        return {"error": error, "norm": found.get("norm")}
    right = _loaded(folder / f"{case['reference']}.pt")
    largest = max(float(value.abs().max()) for value in right["gradients"].values())
    worst = (0.0, "")
    for name, (gradient, *place) in found["gradients"].items():
        expected = right["gradients"][name]
        scale = max(float(expected.abs().max()), SMALL * largest)
        worst = max(worst, (float((gradient - _slice(expected, *place)).abs().max()) / scale, name))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (worst, sorted(found["gradients"])))
    missing = set(right["gradients"]) - {name for _, names in everyone for name in names}
    if missing:
        return {"error": f"nobody holds {sorted(missing)[:3]}", "norm": found["norm"]}
    difference, where = max(each for each, _ in everyone)
    return {"error": "", "norm": found["norm"], "right_norm": right["norm"], "difference": difference, "where": where}


def _slice(whole, dim, size, rank, gated):
    if dim < 0 or size == 1:
        return whole
    if gated:
        return torch.cat([half.chunk(size, dim)[rank] for half in whole.chunk(2, dim)], dim)
    return whole.chunk(size, dim)[rank]


main()
