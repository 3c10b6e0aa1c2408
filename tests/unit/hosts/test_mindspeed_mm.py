"""A native configuration is read, checked, turned into decisions, and written back with a plan's decisions."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from how_many import how_many
from native_files import TEXT, modules

from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig, read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_checks import refused_sizes
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import decided_values, read_decisions, sharding_host
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardSizes


def config(folder: Path, text: str = TEXT) -> NativeConfig:
    path = folder / "config.yaml"
    path.write_bytes(text.encode())
    return read_native(path)


def test_a_file_is_read_with_the_trainers_defaults(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert found.sizes.fully_shard is None and found.sizes.micro_batch == 2
    assert found.features.offload == ("model.layers.{*}",) and found.features.chunk_loss_size == 0
    decisions = read_decisions(found, modules(), 8)
    assert decisions.sizes.label() == "FS8 MBS2 x1"
    assert [group.pattern for group in decisions.groups][-2:] == ["lm_head", ""]
    assert decisions.policies == {
        "model.visual.blocks.{*}": ("recompute",) * 2,
        "model.layers.{*}": ("recompute-offload",) * 4,
    }


def test_decisions_that_the_file_holds_change_no_byte(tmp_path: Path) -> None:
    found = config(tmp_path)
    decisions = read_decisions(found, modules(), 8)
    assert decided_values(found, decisions, modules()) == {}
    assert found.with_values({}) == TEXT


def test_random_decisions_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    generator = random.Random(3)
    found = config(tmp_path)
    policies = sharding_host(found).policies
    for _ in range(how_many(20, 60)):
        fully_shard = generator.choice((2, 4, 8))
        expert = generator.choice((1, 2, 4))
        sizes = ShardSizes(
            num_devices=8,
            fully_shard_size=fully_shard,
            ulysses_size=generator.choice((1, 2)),
            expert_size=expert,
            expert_shard_size=8 // expert,
            micro_batch_size=generator.choice((1, 2, 4)),
            accumulation=generator.choice((1, 3)),
        )
        reshard, forward, backward = generator.random() < 0.5, generator.randint(0, 2), generator.randint(0, 2)
        order = ["model.visual.blocks.{*}", "model.embed_tokens", "model.layers.{*}", "lm_head"]
        generator.shuffle(order)
        groups = tuple(
            GroupChoice(
                pattern=pattern, reshard_after_forward=reshard, forward_prefetch=forward, backward_prefetch=backward
            )
            for pattern in (*order[: generator.randint(2, 4)], "")
        )
        layers = {
            "model.visual.blocks.{*}": tuple(generator.choices(policies, k=2)),
            "model.layers.{*}": tuple(generator.choices(policies, k=4)),
        }
        decisions = ShardedDecisions(
            sizes=sizes,
            groups=groups,
            policies={pattern: one for pattern, one in layers.items() if set(one) != {"keep"}},
            offload_optimizer=generator.random() < 0.3,
        )
        written = found.with_values(decided_values(found, decisions, modules()))
        again = read_decisions(config(tmp_path, written), modules(), 8)
        assert again == decisions, written
        assert "# a tiny model" in written and yaml.safe_load(written)["data"] == yaml.safe_load(TEXT)["data"]


def test_ulysses_is_a_choice_with_flash_attention_alone(tmp_path: Path) -> None:
    assert sharding_host(config(tmp_path)).ulysses
    text = TEXT.replace("  model_id: tiny\n", "  model_id: tiny\n  attn_implementation: sdpa\n")
    assert not sharding_host(config(tmp_path, text)).ulysses


def test_a_plan_that_one_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    found = config(tmp_path)
    decisions = read_decisions(found, modules(), 8)
    first, *others = decisions.groups
    mixed = replace(decisions, groups=(replace(first, reshard_after_forward=False), *others))
    with pytest.raises(PlanError, match="one reshard"):
        decided_values(found, mixed, modules())
    both = replace(decisions, policies={"model.layers.{*}": ("recompute", "recompute-keep-attention", "keep", "keep")})
    with pytest.raises(PlanError, match="attention outputs"):
        decided_values(found, both, modules())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("\ntraining:", "\ntrainning:", "no section 'training'"),
        ("micro_batch_size: 2", "micro_batch_size: two", "whole number"),
        ("ulysses_parallel_size: 1", "ulysses_parallel_size: 3", "does not divide 8"),
        ("ulysses_parallel_size: 1", "tensor_parallel_size: 2", "no tensor parallelism"),
        ("fully_shard_parallel_size: auto", "fully_shard_parallel_size: 3", "does not divide 8"),
        ("ulysses_parallel_size: 1", "ring_attention_size: 2", "NPUs only"),
        ("expert_parallel_size: 1", "expert_parallel_size: 16", "above the 8 devices"),
        ("- model.visual.blocks.{*}\n    - model.layers.{*}", "- model.blocks.{*}", "matches no module"),
        ("- model.layers.{*}  # the", "- model.layers.{0-1}  # the", "wraps 2 of the 4"),
        ("- model.layers.{*}  # the", "- model.layers.{1}  # the", "the trainer refuses the module pattern"),
    ],
)
def test_settings_that_the_trainer_refuses_are_refused_in_a_line(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=words) as error:
        read_decisions(config(tmp_path, TEXT.replace(old, new)), modules(), 8, npu=False)
    assert "\n" not in str(error.value) and "config.yaml" in str(error.value)


def test_a_chunked_batch_needs_recompute_and_offload_of_the_same_modules(tmp_path: Path) -> None:
    chunk = "features:\n  enable_chunk_mbs: true\n  chunkmbs_plan: {apply_modules: ['model.visual.blocks.{*}']}\n"
    with pytest.raises(ConfigError, match="activation_offload_plan lacks"):
        read_decisions(config(tmp_path, TEXT.replace("features:\n", chunk)), modules(), 8)


def test_a_shard_below_the_context_is_refused(tmp_path: Path) -> None:
    text = TEXT.replace("fully_shard_parallel_size: auto", "fully_shard_parallel_size: 2")
    sizes = config(tmp_path, text.replace("ulysses_parallel_size: 1", "ulysses_parallel_size: 4")).sizes
    assert any("below ring x Ulysses" in problem for problem in refused_sizes(sizes, 8))
