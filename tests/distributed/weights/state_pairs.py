"""Weights and optimizer state saved under one layout and loaded under another, for pairs of layouts as JSON; 4 ranks.

``state_pairs.py PAIRS``: a list of [before, after, steps], layouts as cases of ``gpt_layouts``. Every pair: train three steps and save,
load under the other layout and save again, compare both files tensor by tensor to the bit; then ``steps`` more steps under
both, whose losses are printed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "devices"))

import gpt_layouts as job  # first: imports the plugin before megatron

# isort: split
import torch
import torch.distributed as dist
from dist_tensors import stored_tensors
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps

from mindspeed_autoparallel.patching import ENGINE

WARM_UP = 3


def main() -> None:
    """Run all pairs; rank 0 prints the result."""
    ENGINE.enable({"--auto-parallel-plan"})  # experts: one optimizer against two
    dist.init_process_group("nccl")
    found = [_pair(*pair) for pair in json.loads(sys.argv[1])]
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _pair(before: job.Case, after: job.Case, steps: int) -> dict[str, Any]:
    folder: list[Any] = [tempfile.mkdtemp(dir=".") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    first, second = Path(folder[0]) / "first", Path(folder[0]) / "second"
    losses: list[list[float | None]] = []
    for case, source, target in ((before, None, first), (after, first, second)):
        with job._groups(case):
            config, chunks, optimizer = job._build(case)
            if source is None:
                for step in range(WARM_UP):
                    job._train_step(case, config, chunks, optimizer, step)
            else:
                _scramble(chunks)
                _load(source, chunks, optimizer)
            target.mkdir(exist_ok=True)
            dist_checkpointing.save(_state(chunks, optimizer, is_loading=False), str(target))
            dist.barrier()
            mine = [
                job._train_step(case, config, chunks, optimizer, step)[0] for step in range(WARM_UP, WARM_UP + steps)
            ]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        losses.append(next((one for one in everywhere if one and one[0] is not None), []))
    result = {"losses": losses, **(_compared(first, second) if dist.get_rank() == 0 else {})}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return result


def _state(chunks: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return the state as megatron.training describes it with --dist-ckpt-optim-fully-reshardable."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
    }
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    state: dict[str, Any] = {}
    for number, (name, chunk) in enumerate(zip(names, chunks, strict=True)):
        if len(chunks) > 1:
            ps.set_virtual_pipeline_model_parallel_rank(number)
        state[name] = chunk.module.sharded_state_dict(metadata=metadata)
    if len(chunks) > 1:
        ps.set_virtual_pipeline_model_parallel_rank(0)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _load(source: Path, chunks: list[Any], optimizer: Any) -> None:
    loaded = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(source))
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{number}"])
    optimizer.load_state_dict(loaded["optimizer"])


def _scramble(chunks: list[Any]) -> None:
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.add_(1.0)


def _compared(first: Path, second: Path) -> dict[str, Any]:
    """Return how many tensors of both are equal to the bit, and which are not."""
    left, right = stored_tensors(first), stored_tensors(second)
    different = [name for name in left if name not in right or not torch.equal(left[name], right[name])]
    plain = [dist_checkpointing.load_common_state_dict(str(folder)) for folder in (first, second)]
    groups = [_settings(one["optimizer"]) for one in plain]
    return {
        "tensors": len(left),
        "moments": sum("exp_avg" in name for name in left),
        "different": [*different, *sorted(set(right) - set(left)), *(["groups"] if groups[0] != groups[1] else [])],
    }


def _settings(state: Any) -> set[str]:
    """Return steps, loss scales and settings of the parameter groups, each once, by one optimizer or by two.

    Numbers of parameters are a layout's, and so is the mark of expert groups.
    """
    optimizers = [state[number] for number in (0, 1) if number in state] or [state]
    found = set()
    for one in optimizers:
        inner = one.get("optimizer", one)
        found |= {repr(sorted(_plain(group).items())) for group in inner["param_groups"]}
        found.add(repr(inner.get("state", {}).get("common_step")) + repr(one.get("grad_scaler")))
    return found


def _plain(group: dict[str, Any]) -> dict[str, str]:
    return {name: repr(one) for name, one in group.items() if name not in ("params", "is_expert_parallel")}


if __name__ == "__main__":
    main()
