"""Files of other FSDP2 trainers are read into the same sizes, and sizes are written back with everything else kept."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from native_files import modules
from sharded_profile import drawn_profile

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.opening import open_host_file
from mindspeed_autoparallel.hosts.trainers import TrainerFile, read_trainer_file
from mindspeed_autoparallel.planner.sharded.links import Exchanges
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.profiles.sharded import CostPoint, ElementBytes, ModuleCosts, Routing
from mindspeed_autoparallel.spec.sharded import ALL, KEEP, RECOMPUTE, ShardedDecisions, ShardingHost, ShardSizes

FILES = {
    "MindSpeed-MM fsdp2_config": "sharding_size: 4 # shards\nsub_modules_to_wrap:\n  - model.layers.{*}\n  - lm_head\n"
    'recompute_modules: ["model.layers.{*}"] # all\nnum_to_forward_prefetch: 1\nnum_to_backward_prefetch: 1\n',
    "MindSpeed-LLM": "parallel:\n  fsdp_modules: [lm_head]\n  fsdp_size: 4 # shards\n  cp_size: 1\n  ep_size: 2\n"
    '  recompute: false\n  recompute_modules: ["model.layers.{*}"]\n'
    "training:\n  per_device_train_batch_size: 1\n  gradient_accumulation_steps: 3\n",
    "VeOmni": "train:\n  global_batch_size: 16\n  micro_batch_size: 1\n  accelerator:\n    ulysses_size: 2\n"
    "    dp_replicate_size: 2 # shards\n    fsdp_config: {fsdp_mode: fsdp2}\n",
    "NeMo Automodel": "step_scheduler: {global_batch_size: 16, local_batch_size: 1}\ndistributed:\n  strategy: fsdp2\n"
    "  dp_size: none\n  tp_size: 1\n  cp_size: 1\n  ep_size: 4 # shards\n",
    "verl": "fsdp_size: -1 # shards\nparam_offload: false\nulysses_sequence_parallel_size: 2\n",
}
LABELS = {
    "MindSpeed-MM fsdp2_config": "FS4 HSDP2 MBS1 x1",
    "MindSpeed-LLM": "FS8 EP2 EFS1 MBS1 x3",
    "VeOmni": "FS4 HSDP2 UL2 MBS1 x4",
    "NeMo Automodel": "FS8 EP4 MBS1 x2",
    "verl": "FS8 UL2 MBS1 x1",
}


def read(folder: Path, text: str) -> TrainerFile:
    path = folder / "config.yaml"
    path.write_text(text)
    return read_trainer_file(path)


@pytest.mark.parametrize("name", FILES)
def test_sizes_are_read_and_written_back_with_everything_else_kept(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, FILES[name])
    sizes = found.sizes(8)
    assert (found.trainer.name, sizes.label()) == (name, LABELS[name])
    changed = replace(
        sizes, fully_shard_size=8, expert_shard_size=8 // sizes.expert_size if sizes.expert_size > 1 else 1
    )
    if found.trainer.micro_batch:
        changed = replace(changed, micro_batch_size=2)
    if not found.trainer.accumulation and found.trainer.global_batch:
        changed = replace(changed, accumulation=2)
    written = found.with_values(found.size_values(changed))
    again = read(tmp_path, written).sizes(8)
    assert (again.fully_shard_size, again.micro_batch_size, again.accumulation, again.ulysses_size) == (
        changed.fully_shard_size,
        changed.micro_batch_size,
        changed.accumulation,
        changed.ulysses_size,
    )
    assert "# shards" in written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer: adam\n", "is not a configuration of any of MindSpeed-MM fsdp2_config"),
        ("distributed: {strategy: fsdp2, tp_size: 2, cp_size: 2}\n", "tp_size is 2 with distributed.cp_size"),
        ("distributed: {strategy: fsdp2, tp_size: 2, pp_size: 2}\n", "pp_size is 2"),
        ("sharding_size: auto\nsub_modules_to_wrap: [decoder.blocks]\n", "decoder.blocks matches no module"),
        ("distributed: {strategy: fsdp2, cp_size: 16}\n", "more than 8 devices"),
        ("distributed: {strategy: fsdp2, cp_size: two}\n", "whole number"),
    ],
)
def test_unsupported_files_and_settings_are_named_in_a_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read(tmp_path, text).sizes(8)
        open_host_file(tmp_path / "config.yaml").decisions(modules(), 8, False)
    assert "\n" not in str(error.value)


def test_mindspeed_llm_shards_over_all_devices(tmp_path: Path) -> None:
    """Its ``parallel_state.py`` refuses replicas, and any other size than that of the world."""
    found = read(tmp_path, FILES["MindSpeed-LLM"])
    host = open_host_file(tmp_path / "config.yaml").host(False)
    assert not host.hybrid_shard and found.sizes(16).fully_shard_size == 16
    assert "fsdp_size: 16 # shards" in found.with_values(found.size_values(found.sizes(16)))
    assert not found.size_values(found.sizes(4)), "the file has the size of four devices"


def test_a_size_without_a_key_is_not_lost(tmp_path: Path) -> None:
    found = read(tmp_path, FILES["verl"])
    with pytest.raises(ConfigError, match="verl has no key for expert size 2"):
        found.size_values(replace(found.sizes(8), expert_size=2, expert_shard_size=4))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("sub_modules_to_wrap: [lm_head]\n", "FS1 HSDP8 MBS1 x1"),
        ("sharding_size: auto\nsub_modules_to_wrap: [lm_head]\n", "FS8 MBS1 x1"),
        ("parallel: {fsdp_modules: [lm_head], cp_size: 1}\n", "FS8 MBS1 x1"),
        ("train: {accelerator: {ulysses_size: 2, dp_shard_size: 4}}\n", "FS8 UL2 MBS1 x1"),
        ("distributed: {strategy: fsdp2, dp_replicate_size: 2, ep_size: 4}\n", "FS4 HSDP2 EP4 MBS1 x1"),
    ],
)
def test_missing_sizes_are_those_of_the_trainers_code(tmp_path: Path, text: str, label: str) -> None:
    assert read(tmp_path, text).sizes(8).label() == label


def drawn_decisions(generator: random.Random, host: ShardingHost, shipped: ShardedDecisions) -> ShardedDecisions:
    """Return decisions that the host can hold; sizes stay, which have a test of their own."""
    reshard, depth = generator.choice(host.reshard_choices), generator.choice(host.prefetch_depths)
    groups = tuple(
        replace(
            group,
            reshard_after_forward=reshard and not (host.root_stays and not group.pattern),
            forward_prefetch=depth,
            backward_prefetch=depth,
        )
        for group in shipped.groups
        if not (
            host.lists_units and len(shipped.groups) > 2 and group.pattern == "lm_head" and generator.random() < 0.3
        )
    )
    row = tuple(generator.choice(host.policies) for _ in range(4))
    if host.layer_choice == ALL:
        row = (generator.choice(host.policies),) * 4
    policies = {"model.layers.{*}": row} if set(row) != {KEEP} else {}
    return replace(shipped, groups=groups, policies=policies)


@pytest.mark.parametrize("name", FILES)
def test_drawn_decisions_are_read_back_from_what_is_written(tmp_path: Path, name: str) -> None:
    generator, stack = random.Random(7), modules(blocks=0)
    path = tmp_path / "config.yaml"
    for _ in range(30):
        path.write_text(FILES[name])
        file = open_host_file(path)
        shipped, host = file.decisions(stack, 8, False), file.host(False)
        wanted = drawn_decisions(generator, host, shipped)
        found = file.written(wanted, stack)
        text, words = found.text, found.words
        path.write_text(text)
        again = open_host_file(path).decisions(stack, 8, False)
        if name == "verl":  # recomputation stands on its command line, and is on by default
            assert ("enable_gradient_checkpointing=False" in " ".join(words)) == (not wanted.policies)
            again = replace(again, policies=wanted.policies)
        assert (again.sizes, again.policies, set(again.groups)) == (wanted.sizes, wanted.policies, set(wanted.groups))
        assert "# shards" in text


def test_verl_recomputes_every_layer_unless_its_command_line_states_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILES["verl"])
    file, stack = open_host_file(path), modules(blocks=0)
    shipped = file.decisions(stack, 8, False)
    assert set(shipped.policies["model.layers.{*}"]) == {RECOMPUTE}
    assert file.written(shipped, stack).words == ()
    kept = file.written(replace(shipped, policies={}), stack).words
    assert kept == ("actor_rollout_ref.model.enable_gradient_checkpointing=False",)


@pytest.mark.parametrize(
    ("name", "key", "misspelt"),
    [("VeOmni", "ulysses_size", "ulises_size"), ("MindSpeed-LLM", "recompute_modules", "recompute_moduls")],
)
def test_a_misspelt_key_is_named_with_the_right_one(tmp_path: Path, name: str, key: str, misspelt: str) -> None:
    with pytest.raises(ConfigError, match=f"{misspelt}, which {name} does not have; use {key}"):
        read(tmp_path, FILES[name].replace(key, misspelt))


def test_a_file_of_the_older_sharding_is_written_back_for_fsdp2(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{FILES['verl']}strategy: fsdp # older\n")
    file, stack = open_host_file(path), modules(blocks=0)
    decided = file.decisions(stack, 8, False)
    path.write_text(file.written(decided, stack).text)
    assert "strategy: fsdp2 # older" in path.read_text()
    again = open_host_file(path)
    assert again.written(again.decisions(stack, 8, False), stack).text == path.read_text()


def test_recomputed_operators_and_other_strategies_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for line, words in (("activation_checkpointing: selective", "single operators"), ("strategy: ddp", "only fsdp2")):
        path.write_text(f"distributed:\n  tp_size: 1\n  {line}\n")
        with pytest.raises(ConfigError, match=words):
            open_host_file(path).decisions(modules(), 8, False)


def test_prefetch_depths_without_their_switch_have_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    key = "fsdp2_forward_prefetch_depth: 2"
    for line, depths in ((key, (0, 0)), (f"{key}\n  enable_fsdp2_prefetch: true", (2, 2))):
        path.write_text(f"distributed:\n  strategy: fsdp2\n  tp_size: 1\n  {line}\n")
        file = open_host_file(path)
        group = file.decisions(modules(), 8, False).groups[0]
        assert (group.forward_prefetch, group.backward_prefetch) == depths


def test_verl_shards_an_embedding_alone_only_where_the_head_has_its_own_table(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(FILES["verl"])
    file = open_host_file(tmp_path / "config.yaml")
    for is_tied in (False, True):
        stack = [replace(one, is_tied=is_tied and one.name.endswith("embed_tokens")) for one in modules()]
        patterns = [group.pattern for group in file.decisions(stack, 8, False).groups]
        assert ("model.embed_tokens" in patterns) != is_tied, patterns


def test_tensor_parallelism_of_automodel_stays_and_the_ranks_that_share_parameters_are_planned(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "distributed:\n  strategy: fsdp2\n  tp_size: 2  # as is\n  sequence_parallel: true\n"
        "step_scheduler: {local_batch_size: 1, global_batch_size: 8}\n"
    )
    file = open_host_file(path)
    assert (file.described.tensor_size, file.described.sequence_parallel) == (2, True)
    host = file.host(False)
    assert not host.ulysses and not host.expert_parallel
    decisions = file.decisions(modules(), 4, False)
    assert decisions.sizes.label() == "FS4 MBS1 x2"
    changed = replace(decisions.sizes, micro_batch_size=2, accumulation=1, fully_shard_size=2)
    text = file.written(replace(decisions, sizes=changed), modules()).text
    assert "tp_size: 2  # as is" in text and "local_batch_size: 2" in text and "dp_replicate_size: 2" in text


@pytest.mark.parametrize(
    ("lines", "defers", "stays"),
    [
        ("distributed: {strategy: fsdp2, ep_size: 4}\n", True, False),
        ("distributed: {strategy: fsdp2, ep_size: 4, defer_fsdp_grad_sync: false}\n", False, False),
        (
            "distributed: {strategy: fsdp2, ep_size: 4}\nmodel: {backend: {enable_fsdp_optimizations: true}}\n",
            True,
            True,
        ),
        ("train: {accelerator: {fsdp_config: {reshard_after_backward: false}}}\n", False, True),
        ("train: {accelerator: {ulysses_size: 1}}\n", False, False),
    ],
)
def test_reductions_and_frees_of_a_step_are_those_of_the_file(
    tmp_path: Path, lines: str, defers: bool, stays: bool
) -> None:
    (tmp_path / "config.yaml").write_text(lines)
    host = open_host_file(tmp_path / "config.yaml").host(False)
    assert (host.defers_reduction, host.stays_gathered) == (defers, stays)


@pytest.mark.parametrize(("line", "stored"), [("", 2), ("auto", 2), ("torch.bfloat16", 2), ("float32", 4), ("fp32", 4)])
def test_automodel_stores_parameters_and_moments_in_the_type_that_it_loads(
    tmp_path: Path, line: str, stored: int
) -> None:
    model = f"model: {{torch_dtype: {line}}}\n" if line else ""
    (tmp_path / "config.yaml").write_text(f"distributed: {{strategy: fsdp2}}\n{model}")
    found = open_host_file(tmp_path / "config.yaml").described.bytes_of
    assert (found.sharded, found.optimizer, found.gathered, found.reduced) == (stored, 2 * stored, 2, 4)


@pytest.mark.parametrize(
    ("lines", "stored", "reduced"),
    [("", 4, 4), ("model_dtype: bf16\n", 2, 4), ("mixed_precision: {reduce_dtype: bf16}\n", 4, 2)],
)
def test_verl_stores_and_reduces_in_fp32_where_its_file_has_no_other_type(
    tmp_path: Path, lines: str, stored: int, reduced: int
) -> None:
    """Its ``dtype`` is read by other workers than those that train with this file (workers/engine/fsdp)."""
    (tmp_path / "config.yaml").write_text(f"fsdp_size: -1\nstrategy: fsdp2\ndtype: float16\n{lines}")
    found = open_host_file(tmp_path / "config.yaml").described.bytes_of
    assert (found.sharded, found.optimizer, found.gathered, found.reduced) == (stored, 2 * stored, 2, reduced)


@pytest.mark.parametrize(
    ("backend", "once", "in_order"),
    [
        ("", False, False),
        ("dispatcher: torch, fake_balanced_gate: true", False, False),
        ("dispatcher: deepep", True, False),
        ("dispatcher: hybridep, fake_balanced_gate: true", True, True),
    ],
)
def test_kernels_of_automodel_send_a_token_to_a_device_once(
    tmp_path: Path, backend: str, once: bool, in_order: bool
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"distributed: {{strategy: fsdp2, ep_size: 4}}\nmodel: {{backend: {{{backend}}}}}\n")
    routing = open_host_file(path).described.routing
    assert (routing.once, routing.in_order) == (once, in_order)
    drawn = drawn_profile(random.Random(0), 2, experts=True)
    sizes = ShardSizes(num_devices=8, fully_shard_size=8, expert_size=4, expert_shard_size=2)
    plain, found = (Exchanges.of(replace(drawn, topk=2, routing=one), 8, sizes) for one in (Routing(), routing))
    costs = ModuleCosts(at=CostPoint(expert_size=4), forward_us=0.0, backward_us=0.0, expert_sent_bytes=10**9)
    assert (found.forward_us(costs) < plain.forward_us(costs)) == once


def test_divided_experts_of_automodel_stay_gathered_and_whole_ones_are_not_sharded(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for lines, reshards in (
        ("ep_size: 1", True),
        ("ep_size: 2", False),
        ("ep_size: 2\n  moe: {reshard_after_forward: true}", True),
    ):
        path.write_text(f"distributed:\n  strategy: fsdp2\n  {lines}\n")
        file = open_host_file(path)
        group = next(one for one in file.decisions(modules(), 8, False).groups if one.pattern)
        assert group.reshard_after_forward == reshards
    narrow = ElementBytes(sharded=2, optimizer=4)
    profile = drawn_profile(random.Random(0), 2, experts=True, points=(CostPoint(expert_size=8),))
    path.write_text("distributed:\n  strategy: fsdp2\n  ep_size: 8\n")
    file = open_host_file(path)
    decisions = file.decisions(profile.modules, 8, False)
    for sizes, is_empty in ((narrow, True), (ElementBytes(), False)):
        lowering = Lowering(Problem(replace(profile, bytes_of=sizes), file.host(False), 8), decisions)
        units = [unit for unit in lowering.units if unit.name.endswith("experts")]
        assert len(units) == 2 and all(unit.empty == is_empty for unit in units)
        # A layer's experts have 80 million elements, of which a device has an eighth.
        elements = [unit.elements // unit.shard_ranks for unit in units]
        assert elements == [10_000_000, 10_000_000]
        assert lowering.static_bytes >= sum(elements) * (sizes.sharded + sizes.optimizer)


@pytest.mark.parametrize(("key", "stays"), [("", ["model.layers.1"]), ("  reshard_after_forward: true\n", [])])
def test_automodel_keeps_the_last_layer_gathered_where_no_key_is_set(
    tmp_path: Path, key: str, stays: list[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"distributed:\n  strategy: fsdp2\n{key}")
    file, profile = open_host_file(path), drawn_profile(random.Random(0), 2)
    lowering = Lowering(Problem(profile, file.host(False), 8), file.decisions(profile.modules, 8, False))
    units = zip(lowering.structure.modules, lowering.units, strict=True)
    assert [one.name for one, unit in units if one.name and not unit.reshard_after_forward] == stays
    assert lowering.kinds.keys() >= {lowering.structure.place[name] for name in stays}, "a bound counts it by itself"
