"""Random small profiles of sharded trainings."""

import random

from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.profiles import Collective, DeviceCost, LinkTier, Provenance
from mindspeed_autoparallel.profiles.sharded import (
    CostPoint,
    HeadCost,
    ModuleCosts,
    ModuleKind,
    ShardedModule,
    ShardedProfile,
)
from mindspeed_autoparallel.spec.sharded import POLICIES, GroupChoice, ShardedDecisions, ShardingHost, ShardSizes

MB = 10**6
AT_ONE = CostPoint()


def drawn_profile(drawn, num_layers, *, experts=False, points=(AT_ONE,), num_experts=8, tower=0):
    """A decoder with an embedding and a head; layers of one or two kinds; ``tower``: layers of one in front."""

    def link(rate):
        return LinkTier(default=Collective(latency_us=5, bytes_per_s=rate))

    def costs(scale, **more):
        forward = drawn.randint(200, 900) * scale
        values = {
            "input_bytes": drawn.randint(2, 6) * MB,
            "kept_bytes": drawn.randint(10, 80) * MB,
            "attention_bytes": drawn.randint(1, 9) * MB,
            "attention_us": forward * 0.3,
            "forward_transient_bytes": drawn.randint(0, 20) * MB,
            "backward_transient_bytes": drawn.randint(10, 60) * MB,
        }
        values |= more
        found = []
        for point in points:
            share = point.micro_batch_size / (point.ulysses_size * point.ring_size)
            scaled = {
                name: int(value * share) if name.endswith("bytes") else value * share for name, value in values.items()
            }
            found.append(ModuleCosts(at=point, forward_us=forward * share, backward_us=2 * forward * share, **scaled))
        return tuple(found)

    plain = {"attention_us": 0.0, "attention_bytes": 0}
    kinds = {
        "root": ModuleKind(),
        "embedding": ModuleKind(parameters=(4 * MB,), costs=costs(0.02, kept_bytes=0, **plain)),
        "decoder": ModuleKind(parameters=(1000,), costs=costs(0.02, **plain)),
        "head": ModuleKind(parameters=(4 * MB,), costs=costs(0.5, **plain)),
    }
    for kind in range(drawn.randint(1, 2)):
        kinds[f"layer {kind}"] = ModuleKind(parameters=(drawn.randint(1, 30) * MB,), costs=costs(1))
    if experts:
        sent = {"expert_sent_bytes": 20 * MB}
        kinds["experts"] = ModuleKind(parameters=(80 * MB,), costs=costs(1, **plain, **sent))
    if tower:
        kinds["block"] = ModuleKind(parameters=(8 * MB,), costs=costs(0.5))
    modules = [
        ShardedModule(name="", kind="root", pattern="", input_requires_grad=False),
        *(
            ShardedModule(
                name=f"tower.{one}", kind="block", pattern="tower.{*}", is_layer=True, input_requires_grad=one > 0
            )
            for one in range(tower)
        ),
        ShardedModule(name="embed", kind="embedding", pattern="embed", input_requires_grad=False),
        ShardedModule(name="model", kind="decoder", pattern="model"),
    ]
    layers = [name for name in kinds if name.startswith("layer")]
    for number in range(num_layers):
        name = f"model.layers.{number}"
        modules.append(
            ShardedModule(
                name=name, kind=drawn.choice(layers), pattern="model.layers.{*}", parent="model", is_layer=True
            )
        )
        if experts:
            modules.append(
                ShardedModule(
                    name=name + ".experts",
                    kind="experts",
                    pattern="model.layers.{*}.experts",
                    parent=name,
                    holds_experts=True,
                )
            )
    modules.append(ShardedModule(name="head", kind="head", pattern="head", is_head=True))
    return ShardedProfile(
        model="drawn",
        modules=tuple(modules),
        kinds=kinds,
        device=DeviceCost(memory_capacity_bytes=2**40, intra=link(drawn.choice((2e10, 1e11))), inter=link(2e9)),
        provenance=Provenance(source="analytic", device="none", created_utc="2026-01-01T00:00:00Z"),
        tokens_per_sample=1024,
        attention_heads=(8,),
        num_experts=num_experts if experts else 0,
        topk=2,
        head=HeadCost(tokens=1024, vocabulary=4000),
        memory_bytes_per_s=1e12,
        host_link_bytes_per_s=drawn.choice((0.0, 2e10)),
        optimizer_us_per_element=1e-5,
    )


def decisions_of(profile, sizes, **switches):
    """All modules wrapped one by one, as the shipped files do."""
    patterns = dict.fromkeys(module.pattern for module in profile.modules if not module.holds_experts)
    return ShardedDecisions(sizes=sizes, groups=tuple(GroupChoice(pattern=name, **switches) for name in patterns))


def drawn_sizes(drawn, expert_size):
    """Sizes of 8 devices."""
    return ShardSizes(
        num_devices=8,
        fully_shard_size=drawn.choice((4, 8)),
        expert_size=expert_size,
        expert_shard_size=8 // expert_size if expert_size > 1 else 1,
        accumulation=drawn.randint(1, 3),
    )


def drawn_problem(seed, num_layers=None):
    """One problem at fixed sizes: what to plan, the decisions around it, and the generator for more."""
    drawn = random.Random(seed)
    experts = drawn.random() < 0.4
    profile = drawn_profile(
        drawn, num_layers or drawn.randint(2, 4), experts=experts, points=(CostPoint(), CostPoint(expert_size=2))
    )
    sizes = drawn_sizes(drawn, 2 if experts and drawn.random() < 0.5 else 1)
    policies = tuple(drawn.sample(POLICIES[1:], drawn.randint(1, 3)))
    host = ShardingHost(
        name="drawn", policies=("keep", *policies), variant=drawn.choice(("torch", "torch-2.7", "mindspeed-mm"))
    )
    switches = {
        "reshard_after_forward": drawn.random() < 0.7,
        "forward_prefetch": drawn.choice((0, 1)),
        "backward_prefetch": drawn.choice((0, 1)),
    }
    return Problem(profile, host, 4), decisions_of(profile, sizes, **switches), drawn
