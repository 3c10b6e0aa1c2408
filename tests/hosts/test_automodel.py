"""What NeMo Automodel's own code wraps and prefetches, beside what its file is read to decide (AUTOMODEL_SOURCES: a checkout)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from native_files import modules
from sharded_profile import drawn_profile

from mindspeed_autoparallel.hosts.opening import open_host_file
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.profiles.sharded import ModuleKind

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not os.environ.get("AUTOMODEL_SOURCES"), reason="AUTOMODEL_SOURCES names no checkout"),
]
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist, transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
from nemo_automodel.components.distributed.parallelizer import apply_fsdp2_sharding_recursively
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, **sizes))
apply_fsdp2_sharding_recursively(
    model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), MixedPrecisionPolicy(), None,
    True, int(sys.argv[3]), int(sys.argv[2]),
)
states = {one._get_fsdp_state(): name for name, one in model.named_modules() if hasattr(one, "_get_fsdp_state")}
lists = lambda state: (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
found = {name: [[states[one] for one in row] for row in lists(state)] for state, name in states.items()}
stays = [name for state, name in states.items() if state._fsdp_param_group.post_forward_mesh_info is None]
print(json.dumps([found, stays]))
"""


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 1)])
def test_units_and_prefetch_lists_are_those_of_its_own_code(tmp_path: Path, forward: int, backward: int) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        PROGRAM,
        os.environ["AUTOMODEL_SOURCES"],
        str(forward),
        str(backward),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, stays = json.loads(done.stdout.splitlines()[-1])
    path = tmp_path / "config.yaml"
    path.write_text(
        "distributed: {strategy: fsdp2, tp_size: 1, enable_fsdp2_prefetch: true, "
        f"fsdp2_forward_prefetch_depth: {forward}, fsdp2_backward_prefetch_depth: {backward}}}\n"
    )
    file = open_host_file(path)
    kept = tuple(replace(one, kind="root") for one in modules(blocks=0) if "experts" not in one.name)
    profile = replace(drawn_profile(random.Random(0), 1), modules=kept, kinds={"root": ModuleKind()})
    lowering = Lowering(Problem(profile, file.host(False), 8), file.decisions(kept, 8, False))
    names = [one.name for one in lowering.structure.modules]
    ours = {
        name: [[names[one] for one in row] for row in (unit.forward_prefetch, unit.backward_prefetch)]
        for name, unit in zip(names, lowering.units, strict=True)
        if name
    }
    assert ours == theirs
    kept_gathered = [
        name for name, unit in zip(names, lowering.units, strict=True) if name and not unit.reshard_after_forward
    ]
    assert kept_gathered == stays


MESHES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from nemo_automodel.components.distributed import mesh_utils
tensor, replicas, world = map(int, sys.argv[2:])
dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
kinds = [one for one in vars(mesh_utils).values() if getattr(one, "__name__", "") == "ParallelismSizes"]
sizes = kinds[0](tp_size=tensor, dp_replicate_size=replicas)
mesh, _ = mesh_utils._create_fsdp2_device_mesh(sizes, world_size=world)
print(json.dumps({name: mesh[name].mesh.tolist() for name in mesh.mesh_dim_names}))
"""


@pytest.mark.parametrize(("tensor", "replicas", "world"), [(2, 1, 8), (2, 2, 16), (4, 1, 16), (8, 1, 8)])
def test_tensor_parallel_meshes_are_those_of_its_own_code(
    tmp_path: Path, tensor: int, replicas: int, world: int
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", MESHES, os.environ["AUTOMODEL_SOURCES"]]
    words = [str(one) for one in (tensor, replicas, world)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    mesh = json.loads(done.stdout.splitlines()[-1])
    path = tmp_path / "config.yaml"
    path.write_text(f"distributed: {{strategy: fsdp2, tp_size: {tensor}, dp_replicate_size: {replicas}}}\n")
    file = open_host_file(path)
    sizes = file.decisions(modules(), world // tensor, False).sizes
    assert mesh["tp"] == list(range(file.described.tensor_size)) == list(range(tensor))
    assert mesh["dp_shard"] == [tensor * rank for rank in range(sizes.fully_shard_size)]
    assert len(mesh["dp_replicate"]) == sizes.replicas == replicas
