"""Records of sharded trainings: round trips through JSON, and what is refused."""

import json

import pytest

from mindspeed_autoparallel.errors import ConfigError, PlanError, ProfileError
from mindspeed_autoparallel.profiles import Collective, DeviceCost, LinkTier, Provenance
from mindspeed_autoparallel.profiles.sharded import CostPoint, ModuleCosts, ModuleKind, ShardedModule, ShardedProfile
from mindspeed_autoparallel.spec.codec import from_json, to_json
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, GroupChoice, ShardedDecisions, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan

LINK = LinkTier(default=Collective(latency_us=1, bytes_per_s=1e9))


def small_profile(**changes):
    values = {
        "model": "two layers",
        "modules": (
            ShardedModule(name="", kind="root", pattern=""),
            *(ShardedModule(name=f"layers.{i}", kind="layer", pattern="layers.{*}", is_layer=True) for i in range(2)),
        ),
        "kinds": {
            "root": ModuleKind(parameters=(10,)),
            "layer": ModuleKind(
                parameters=(100, 20), costs=(ModuleCosts(at=CostPoint(), forward_us=5, backward_us=10),)
            ),
        },
        "device": DeviceCost(memory_capacity_bytes=2**30, intra=LINK, inter=LINK),
        "provenance": Provenance(source="analytic", device="test", created_utc="2026-01-01T00:00:00Z"),
        "tokens_per_sample": 8,
        "attention_heads": (4,),
    }
    return ShardedProfile(**{**values, **changes})


def test_profile_round_trip(tmp_path):
    profile = small_profile()
    profile.write(tmp_path / "profile.json")
    assert ShardedProfile.read(tmp_path / "profile.json") == profile
    assert profile.kinds["layer"].at(CostPoint(ulysses_size=2)) is None


def test_decisions_round_trip():
    decisions = ShardedDecisions(
        sizes=ShardSizes(num_devices=16, fully_shard_size=8, expert_size=4, expert_shard_size=4, accumulation=2),
        groups=(GroupChoice(pattern="layers.{*}", forward_prefetch=1), GroupChoice(pattern="head", wrapped=False)),
        policies={"layers.{*}": (RECOMPUTE, KEEP)},
    )
    assert from_json(ShardedDecisions, json.loads(json.dumps(to_json(decisions))), "decisions") == decisions
    assert [decisions.policy("layers.{*}", index) for index in range(3)] == [RECOMPUTE, KEEP, KEEP]
    assert decisions.group("head") is None
    assert decisions.sizes.label() == "FS8 HSDP2 EP4 MBS1 x2"
    assert decisions.sizes.global_batch_size == 32


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_devices": 8, "fully_shard_size": 3}, "does not divide 8 devices"),
        ({"num_devices": 8, "fully_shard_size": 2, "ulysses_size": 4}, "does not divide the fully_shard size 2"),
        ({"num_devices": 8, "fully_shard_size": 8, "expert_size": 16}, "experts spread 16 does not divide 8"),
        ({"num_devices": 8, "fully_shard_size": 8, "accumulation": 0}, "accumulation must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit(sizes, words):
    with pytest.raises(ConfigError, match=words):
        ShardSizes(**sizes)


def test_refused_profiles_and_plans():
    with pytest.raises(ProfileError, match="must be listed before it"):
        small_profile(
            modules=(
                ShardedModule(name="", kind="root", pattern=""),
                ShardedModule(name="a.b", kind="layer", pattern="", parent="a"),
            )
        )
    with pytest.raises(ProfileError, match="no kind 'other'"):
        small_profile(modules=(ShardedModule(name="", kind="other", pattern=""),))
    with pytest.raises(ProfileError, match="schema_version 9"):
        ShardedProfile.parse({**to_json(small_profile()), "schema_version": 9})
    with pytest.raises(PlanError, match="not a plan of a sharded training"):
        ShardedPlan.parse({"format": "mindspeed-autoparallel/plan"})
    with pytest.raises(ConfigError, match="unknown policy 'swap'"):
        ShardedDecisions(
            sizes=ShardSizes(num_devices=1, fully_shard_size=1), groups=(), policies={"layers.{*}": ("swap",)}
        )
