"""Run under torchrun on 4 ranks: random switches between five layouts, checked by ranks and collectives; JSON on rank 0."""

import functools
import json
import random
import sys
import time
from pathlib import Path

# Runs as it is written in the documentation, without a path from outside.
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

import bare_cpu
import torch
import torch.distributed as dist

bare_cpu.install()
from megatron.core import parallel_state as mpu  # noqa: E402

from mindspeed_autoparallel.errors import ConfigError  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.rng import ModuleRandomStates  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.states import ModuleStates  # noqa: E402

bare_cpu.settle()
LAYOUTS = {
    "dp4": (1, 1, 1, None),
    "tp2": (2, 1, 1, None),
    "tp2pp2": (2, 2, 1, None),
    "cp2": (1, 1, 2, None),
    "pp2vp2": (1, 2, 1, 2),
}


def initialize(tensor, pipeline, context, virtual):
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        virtual_pipeline_model_parallel_size=virtual,
    )


def probe():
    """What Megatron says and what its groups do."""
    sums = []
    for group in (
        mpu.get_tensor_model_parallel_group(),
        mpu.get_data_parallel_group(with_context_parallel=True),
        mpu.get_context_parallel_group(),
    ):
        value = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    return (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_data_parallel_rank(),
        mpu.get_virtual_pipeline_model_parallel_world_size(),
        *sums,
    )


def main():
    dist.init_process_group("gloo")
    states = ModuleStates(mpu)
    with states.groups.installed(mpu):
        initialize(*LAYOUTS["dp4"])
    states.adopt("dp4")
    expected = {"dp4": probe()}
    for name, sizes in LAYOUTS.items():
        if name != "dp4":
            states.build(name, functools.partial(initialize, *sizes))
    rng = ModuleRandomStates(states)
    rng.seed(5)
    before = vars(mpu).copy()
    found = {"groups": [states.groups.num_requested, states.groups.num_created]}
    for name in LAYOUTS:
        with states.use(name):
            expected[name] = probe()
    found["layouts"] = {name: list(value) for name, value in expected.items()}
    chooser = random.Random(0)
    good = 0
    for _ in range(50):
        name, inner = chooser.choice(list(LAYOUTS)), chooser.choice(list(LAYOUTS))
        with states.use(name):
            good += probe() == expected[name]
            with states.use(inner):
                good += probe() == expected[inner]
            good += probe() == expected[name]
        good += probe() == expected["dp4"]
    found["good_probes"] = good
    try:
        with states.use("tp2"), states.use("pp2vp2"):
            raise RuntimeError("an encoder fails")
    except RuntimeError:
        found["restored_after_exception"] = states.current == "dp4" and probe() == expected["dp4"]
    with states.use("pp2vp2"):
        mpu.set_virtual_pipeline_model_parallel_rank(1)
    with states.use("pp2vp2"):
        found["virtual_rank_written_back"] = mpu.get_virtual_pipeline_model_parallel_rank()
    found["outer_virtual_rank"] = mpu.get_virtual_pipeline_model_parallel_rank()
    found["globals_equal_afterwards"] = all(vars(mpu)[k] is v for k, v in before.items() if k.startswith("_MPU"))
    try:
        with states.use("nothing"):
            pass
    except ConfigError as error:
        found["unknown"] = str(error)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw():
        with get_cuda_rng_tracker().fork():
            return torch.rand(1).item()

    with states.use("tp2"):
        first = draw()
    outside = draw()
    with states.use("tp2"):
        second = draw()
    with states.use("tp2"):
        third = draw()
    draws = [None] * 4
    dist.all_gather_object(draws, [first, outside, second, third])
    found["draws"] = draws
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20000
    # Time of this process: others that run beside it are not its business.
    started = time.process_time()
    for _ in range(rounds):
        with states.use("tp2pp2"):
            pass
    found["switch_pair_us"] = (time.process_time() - started) / rounds * 1e6
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
