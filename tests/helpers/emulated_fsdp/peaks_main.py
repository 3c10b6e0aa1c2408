"""Live storages of real trainings under torch's ``fully_shard`` beside the replay of their measured profiles.

Seeds stand on the command line; a line of JSON for each: predicted and live bytes between steps and at the peak.
From 1000 on layers are recomputed by reentrant checkpoints around them; from 2000 on the decoder's layers run a micro
batch in two parts, each recomputed. From 3000 on gradients are reduced, or parameters freed in backward, in the last
micro batch alone. From 4000 on experts are units that are hooked at their layer, by MindSpeed-MM's copy of
``fully_shard`` (the checkout of ``MINDSPEED_MM``, under torch 2.7.1).
"""

import dataclasses
import gc
import json
import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import clock_main
import torch
import torch.distributed as dist
from drawn_models import Model, batch_of, configuration, drawn_shape, parted, recomputing
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed_autoparallel.hosts.mindspeed_mm import read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import read_decisions
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.pricing import layer_policies
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages
from mindspeed_autoparallel.runtime.fsdp2.measuring import measure_steps
from mindspeed_autoparallel.runtime.fsdp2.modules import find_modules
from mindspeed_autoparallel.runtime.fsdp2.profile import sharded_profile
from mindspeed_autoparallel.schedule.sharded import replay
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, RECOMPUTE_KEEP_ATTENTION, ShardingHost, ShardSizes

WORLD = 8
DECODER = "language_model.layers.{*}"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Device:
    """A CPU whose memory is tracked without waiting for a backend's threads: the fake group has none."""

    name = "cpu"
    synchronize = staticmethod(lambda: None)
    is_out_of_memory = staticmethod(lambda error: False)
    total_memory_bytes = staticmethod(lambda: 2**40)
    fingerprint = staticmethod(dict)

    @staticmethod
    def tracked_memory():
        return TrackedStorages(let_go_s=0.0)


class TrainEngine:
    """What the host's engine is to measuring."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def train_step(self, batches):
        self.model(**next(batches)).backward()


def sharded(model, wrapped, policy, training=None, hooked=False, expert_size=1):
    """Apply ``fully_shard`` to the modules of ``wrapped`` (in pre-order), children first, as units of ``training``."""
    clock_main.DEVICE.begin()
    meshes = {
        size: init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("replicate", "shard")) for size in (2, 4)
    }
    meshes[WORLD] = init_device_mesh("cpu", (WORLD,))
    units = training.units if training else [None] * len(wrapped)
    for name, unit in reversed(list(zip(wrapped, units, strict=True))):
        values = {}
        if unit is not None:
            mesh = (
                meshes[unit.shard_ranks]
                if unit.replicated or unit.shard_ranks == WORLD
                else meshes[unit.shard_ranks]["shard"]
            )
            values = {"mesh": mesh, "reshard_after_forward": unit.reshard_after_forward}
            if expert_size > 1 and name.endswith("experts"):
                values["shard_placement_fn"] = lambda parameter: Shard(1)
            if hooked and name.endswith("experts"):
                values["hook_module"] = model.get_submodule(name.removesuffix(".mlp.experts"))
        fsdp.fully_shard(model.get_submodule(name), mp_policy=policy, **({"mesh": meshes[WORLD]} | values))
    for name, unit in zip(wrapped, units, strict=True):
        if unit is not None:
            module = model.get_submodule(name)
            module.set_modules_to_forward_prefetch([model.get_submodule(wrapped[one]) for one in unit.forward_prefetch])
            module.set_modules_to_backward_prefetch(
                [model.get_submodule(wrapped[one]) for one in unit.backward_prefetch]
            )
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def measured(shape, config, policy, expert_size):
    """Return the profile of a plain training: nothing recomputed, every listed module a unit."""
    model = Model(shape, expert_size)
    found = find_modules(model, config)
    wrapped = ["", *(module.name for module in found.modules[1:])]
    optimizer = sharded(model, wrapped, policy)
    trainer = SimpleNamespace(trainer=TrainEngine(model, optimizer), model=model)
    native = SimpleNamespace(config=config, set_values=lambda values: trainer.__dict__.update(values))
    batches = {1: [batch_of(shape)]}
    trainer.get_dataloader = lambda: batches.get(trainer.__dict__["training.micro_batch_size"], [])
    profile = sharded_profile(trainer, native, found, measure_steps(trainer, native, found, Device), Device)
    return dataclasses.replace(profile, **at_expert_size(profile, expert_size))


def in_parts(shape, config, policy):
    """Return the profile of micro batches of two parts, with the costs of one part beside those of both."""
    whole = measured(shape, config, policy, 1)
    half = measured(dataclasses.replace(shape, samples=shape.samples // 2), config, policy, 1)
    kinds = {}
    for name, kind in whole.kinds.items():
        points = [dataclasses.replace(one.at, micro_batch_size=2) for one in kind.costs]
        both = [dataclasses.replace(one, at=at) for one, at in zip(kind.costs, points, strict=True)]
        kinds[name] = dataclasses.replace(kind, costs=(*half.kinds[name].costs, *both))
    return dataclasses.replace(whole, kinds=kinds)


def at_expert_size(profile, size):
    """Return kinds as a measurement at this expert size gives them: the profile counts all experts."""
    kinds = {}
    for name, kind in profile.kinds.items():
        scale = size if name.startswith("language_model.layers.{*}.mlp.experts") else 1
        costs = tuple(
            dataclasses.replace(cost, at=dataclasses.replace(cost.at, expert_size=size)) for cost in kind.costs
        )
        parameters = tuple(scale * one for one in kind.parameters)
        shapes = tuple((scale * shape[0], *shape[1:]) for shape in kind.shapes)
        kinds[name] = dataclasses.replace(kind, parameters=parameters, shapes=shapes, costs=costs)
    return {"kinds": kinds}


def live(shape, problem, decisions, training, policy):
    """Return the live bytes between two steps and at the peak of the second."""
    expert_size = decisions.sizes.expert_size
    model = Model(shape, expert_size)
    for name, chosen in layer_policies(problem, decisions).items():
        module = model.get_submodule(name)
        if problem.host.reentrant:
            module.is_called_again = True
        else:
            module.forward = recomputing(module.forward, chosen == RECOMPUTE_KEEP_ATTENTION)
    for record in training.modules:
        if record.chunks > 1:
            module = model.get_submodule(record.name)
            module.forward = parted(module.forward, record.chunks)
    structure = problem.units(decisions)
    wrapped = [module.name for module in structure.modules]
    optimizer = sharded(model, wrapped, policy, training, bool(decisions.hooks), expert_size)
    batch = batch_of(shape)

    def step():
        for number in range(decisions.sizes.accumulation):
            last = number == decisions.sizes.accumulation - 1
            model.set_is_last_backward(last)
            model.set_requires_all_reduce(last)
            model.set_reshard_after_backward(last or not training.stays_gathered)
            if training.defers_reduction:
                model.set_requires_gradient_sync(last)
            model(**batch).backward()
        optimizer.step()

    saved = set[int]()
    with torch.autograd.graph.saved_tensors_hooks(partial(address_of, saved), lambda tensor: tensor):
        step()
    optimizer.zero_grad()
    gc.collect()
    with TrackedStorages(let_go_s=0.0) as storages:
        between = storages.current_bytes()
        storages.take_peak_bytes()
        step()
        peak = storages.take_peak_bytes()
    tensors = [tensor for tensor in batch.values() if tensor is not None]
    own = sum(tensor.nbytes for tensor in tensors)
    # The replay counts what modules save of the batch, such as pictures, and no more of it.
    unsaved = sum(tensor.nbytes for tensor in tensors if tensor.data_ptr() not in saved)
    return between - own, peak - unsaved


def address_of(addresses, tensor):
    """Note the address of what autograd saves, and return it."""
    if tensor.layout == torch.strided:
        addresses.add(tensor.untyped_storage().data_ptr())
    return tensor


def run(seed):
    drawn = random.Random(seed)
    shape = drawn_shape(drawn)
    is_reentrant, has_parts, defers, has_hooks = (seed // 1000 == one for one in range(1, 5))
    if seed >= 1000:  # few logits, so that the peak is inside the layers
        shape = dataclasses.replace(shape, samples=max(2, shape.samples), vocabulary=32)
    coin = lambda chance=0.5: drawn.random() < chance
    param, reduce = drawn.choice((("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")))
    if has_hooks:
        shape = dataclasses.replace(shape, experts=(True, *shape.experts[1:]))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[param], reduce_dtype=DTYPES[reduce])
    listed = ["visual.blocks.{*}", "visual"] if shape.tower else []
    listed += ["language_model.embed_tokens", "language_model.layers.{*}", "language_model", "lm_head"]
    listed += ["language_model.layers.{*}.mlp.experts"] if has_hooks else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(configuration(shape, listed, param, reduce))
        config = read_native(path)
    expert_size = 2 if any(shape.experts) and coin() and not (has_parts or has_hooks) else 1
    profile = in_parts(shape, config, policy) if has_parts else measured(shape, config, policy, expert_size)
    gc.collect()
    foreign = live_now()
    policies = (KEEP, RECOMPUTE, *(() if is_reentrant else (RECOMPUTE_KEEP_ATTENTION,)))
    once = drawn.choice(((True, True), (True, False), (False, True))) if defers else (False, False)
    host = ShardingHost(
        name="drawn",
        variant="mindspeed-mm" if has_hooks else "torch",
        policies=policies,
        reentrant=is_reentrant,
        defers_reduction=once[0],
        stays_gathered=once[1],
    )
    shipped = read_decisions(config, profile.modules, WORLD, npu=False)
    reshard, depth = coin(0.7), drawn.choice((0, 0, 1, 2))
    groups = tuple(
        dataclasses.replace(group, reshard_after_forward=reshard, forward_prefetch=depth, backward_prefetch=depth)
        for group in shipped.groups
        if not group.pattern or coin(0.85) or (shape.frozen and group.pattern == "visual")
    )
    policies = {}
    for pattern in dict.fromkeys(one.pattern for one in profile.modules if one.is_layer and one.needs_backward):
        count = sum(module.pattern == pattern for module in profile.modules)
        chance = drawn.choice((0.0, 0.5, 1.0))
        recompute = drawn.choice((RECOMPUTE, RECOMPUTE, host.policies[-1]))
        policies[pattern] = tuple(recompute if coin(chance) else KEEP for _ in range(count))
    sizes = ShardSizes(
        num_devices=WORLD,
        fully_shard_size=drawn.choice((WORLD, WORLD, 4)),
        expert_size=expert_size,
        expert_shard_size=WORLD // expert_size if expert_size > 1 else 1,
        micro_batch_size=2 if has_parts else 1,
        accumulation=drawn.randint(1 + defers, 3),
    )
    hooks = (DECODER,) if has_hooks else ()
    decisions = dataclasses.replace(shipped, sizes=sizes, groups=groups, policies=policies, hooks=hooks)
    if has_parts:
        policies.pop(DECODER, None)
        decisions = dataclasses.replace(decisions, micro_batch_chunk=1, chunked=(DECODER,))
    problem = Problem(profile, host, WORLD)
    lowering = Lowering(problem, decisions)
    lowering.forced = dict.fromkeys(lowering.forced, RECOMPUTE)  # no host's memory takes inputs here
    training = lowering.training(layer_policies(problem, decisions))
    assert has_parts == any(one.chunks > 1 for one in training.modules)
    replayed = replay(training)
    between, peak = live(shape, problem, decisions, training, policy)
    return {
        "seed": seed,
        "bytes": {
            "between steps": [training.static_bytes, between - foreign],
            "peak": [replayed.peak_bytes, peak - foreign],
        },
        "point": replayed.peak_point,
        "terms": replayed.peak_terms,
        "sizes": sizes.label(),
        "policies": {key: "".join(word[0] + word[-1] for word in row) for key, row in policies.items()},
        "types": [param, reduce],
        "reshard": [reshard, depth],
        "shape": dataclasses.asdict(shape),
    }


def live_now():
    with TrackedStorages(let_go_s=0.0) as storages:
        return storages.current_bytes()


def main():
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    if any(int(seed) >= 4000 for seed in sys.argv[1:]):
        clock_main.use_host(os.environ["MINDSPEED_MM"] + "/mindspeed_mm/fsdp/ops/fully_shard/fully_shard.py")
    clock_main.use_device()
    gc.collect()
    gc.freeze()  # what is imported holds no tensor of a case, and every look at all objects would pass through it
    for seed in map(int, sys.argv[1:]):
        torch.manual_seed(seed)
        print(json.dumps(run(seed)), flush=True)


if __name__ == "__main__":
    main()
