"""The plugin in MindSpeed-MM's native FSDP2 trainer itself, on CPU; and what is read from its files beside its code."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from native_cells import (
    EXPERTS,
    EXPERTS_HYBRID,
    HYBRID,
    KINDS,
    PLANS,
    PREFETCHED,
    SHARDED,
    SOURCES,
    ULYSSES,
    environment,
    needs_sources,
    renamed,
    run_native_host,
    write_config,
    write_model,
)
from native_runs import plan_of
from sharded_profile import drawn_profile

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeSizes, is_native, read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_checks import refused_sizes
from mindspeed_autoparallel.hosts.patterns import compile_pattern
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.profiles.sharded import ModuleKind, ShardedModule
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions, ShardingHost, ShardSizes

pytestmark = needs_sources()


CELLS = [
    *(("moe", "text", plan) for plan in (SHARDED, HYBRID, ULYSSES, EXPERTS, EXPERTS_HYBRID)),
    *(("moe", "pictures", plan) for plan in (SHARDED, EXPERTS_HYBRID)),
    ("dense", "text", SHARDED),
    *(("omni", "sounds", plan) for plan in (SHARDED, HYBRID, PREFETCHED)),
    *(("linear", "pictures", plan) for plan in (SHARDED, HYBRID, ULYSSES)),
    *(("linear-moe", "pictures", plan) for plan in (SHARDED, EXPERTS, EXPERTS_HYBRID)),
    ("mimo", "text", SHARDED),
    *(("mimo", "pictures", plan) for plan in (SHARDED, EXPERTS, EXPERTS_HYBRID)),
    *(("asr", "speech", plan) for plan in (SHARDED, HYBRID, PREFETCHED)),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a function: the folder with a model and its data, and the steps of one process, made once."""
    folders, steps = {}, {}

    def get(kind, data):
        if not os.environ.get(KINDS[kind].python):
            pytest.skip(f"set {KINDS[kind].python} (tests/hosts/README.md)")
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            write_model(folders[kind], kind)
        if (kind, data) not in steps:
            config = write_config(folders[kind], kind, {"training.gradient_accumulation_steps": 4}, data=data)
            alone = run_native_host(1, config, python=KINDS[kind].python)
            assert alone.status == 0, alone.output[-3000:]
            steps[kind, data] = alone.steps
        return folders[kind], steps[kind, data]

    return get


def close(steps, expected):
    flat = [value for step in steps for value in step]
    assert len(flat) == 6 and flat == pytest.approx([value for step in expected for value in step], rel=1e-6)


def alone_with_ulysses(folder, kind, data):
    """Return the steps of the trainer without our plugin on two devices that share each sequence."""
    values = {"training.gradient_accumulation_steps": 4, "parallel.ulysses_parallel_size": 2}
    config = write_config(folder, kind, {**values, "model.attn_implementation": "flash_attention_2"}, False, data)
    alone = run_native_host(2, config, python=KINDS[kind].python)
    assert alone.status == 0, alone.output[-3000:]
    return alone.steps


@pytest.mark.parametrize(("kind", "data", "name"), CELLS, ids=map(" ".join, CELLS))
def test_plans_train_as_one_process_does(prepared, kind, data, name):
    folder, expected = prepared(kind, data)
    decided = PLANS[name]
    flash = {"model.attn_implementation": "flash_attention_2"} if decided.sizes.ulysses_size > 1 else {}
    plan_of(renamed(decided, kind), KINDS[kind].model_id or str(folder / "model")).write(folder / "plan.json")
    config = write_config(folder, kind, flash, data=data)
    words = ("--auto-parallel-plan", "plan.json", "--auto-parallel-check-steps", "3")
    done = run_native_host(decided.sizes.num_devices, config, *words, python=KINDS[kind].python)
    assert done.status == 0, done.output[-3000:]
    assert "ms predicted" in done.output
    if (data, name) == ("pictures", ULYSSES):  # where the trainer's own steps are others than those of one process
        expected = alone_with_ulysses(folder, kind, data)
    close(done.steps, expected)


@pytest.mark.parametrize("kind", ["moe", "mimo"])
def test_a_search_writes_a_plan_and_a_yaml_that_train_as_one_process_does(prepared, kind):
    folder, _expected = prepared(kind, "text")
    config = write_config(folder, kind, {"training.gradient_accumulation_steps": 2})
    text = config.read_text("utf-8")
    words = ["--auto-parallel-mm", "--simulated-nnodes", "1", "--simulated-nproc-per-node", "4"]
    python = KINDS[kind].python
    found = run_native_host(2, config, *words, python=python)
    assert found.status == 0, found.output[-3000:]
    assert config.read_text("utf-8") == text
    sizes = json.loads((folder / "plan.json").read_text())["decisions"]["sizes"]
    written = folder / "config.planned.yaml"
    assert "# the whole world" in written.read_text("utf-8") and "# every layer" in written.read_text("utf-8")
    assert sizes["num_devices"] == 4
    planned = run_native_host(4, config, "--auto-parallel-plan", "plan.json", python=python)
    by_yaml = run_native_host(4, write_plain(written), python=python)
    # The trainer averages over micro batches, so one process trains in micro batches of the plan's size.
    size = sizes["micro_batch_size"]
    batch = {"training.micro_batch_size": size, "training.gradient_accumulation_steps": 8 // size}
    alone = run_native_host(1, write_config(folder, kind, batch, plugin=False), python=python)
    assert planned.status == by_yaml.status == alone.status == 0, planned.output[-3000:] + by_yaml.output[-3000:]
    close(planned.steps, alone.steps)
    close(by_yaml.steps, alone.steps)


def write_plain(path: Path) -> Path:
    """Write the file without our plugin."""
    plain = path.with_name("plain.yaml")
    plain.write_text(path.read_text("utf-8").replace("    - mindspeed_autoparallel.plugin\n", ""), "utf-8")
    return plain


def in_host(program: str, *words: str) -> str:
    command = [os.environ[SOURCES[2]], "-W", "ignore", "-c", program, *words]
    variables = {**environment(), "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return done.stdout.splitlines()[-1]


def test_patterns_match_what_the_hosts_own_code_matches():
    generator = random.Random(9)
    parts = [
        "model",
        "layers",
        "{*}",
        "{0-3}",
        "{2-2}",
        "{3}",
        "{1-0}",
        "{0-1,3-4}",
        "*",
        "?",
        "3",
        "12",
        "mlp",
        "{x-y}",
    ]
    patterns = [".".join(generator.choices(parts, k=generator.randint(1, 4))) for _ in range(400)]
    names = [".".join(generator.choices(["model", "layers", "0", "3", "12", "mlp"], k=3)) for _ in range(40)]
    names += [".".join(generator.choices(["model", "layers", "1", "2"], k=2)) for _ in range(10)] + ["model", "3"]
    program = """
import json, sys
from mindspeed.fsdp.utils.str_match import module_name_match
found = []
for pattern in json.loads(sys.argv[1]):
    try:
        found.append([bool(module_name_match(pattern, name)) for name in json.loads(sys.argv[2])])
    except ValueError:
        found.append(None)
print(json.dumps(found))
"""
    theirs = json.loads(in_host(program, json.dumps(patterns), json.dumps(names)))
    for pattern, expected in zip(patterns, theirs, strict=True):
        try:
            compiled = compile_pattern(pattern)
        except ConfigError:
            assert expected is None, pattern
        else:
            assert [compiled.matches(name) for name in names] == expected, pattern


def test_sizes_are_refused_where_the_hosts_own_code_refuses_them():
    generator = random.Random(4)
    keys = ["fully_shard_parallel_size", "tensor_parallel_size", "ring_attention_size", "ulysses_parallel_size"]
    keys += ["expert_parallel_size", "expert_fully_shard_parallel_size", "data_parallel_size"]
    cases = []
    for _ in range(400):
        case = {key: generator.choice((1, 1, 2, 3, 4, 8)) for key in keys if generator.random() < 0.6}
        cases.append((generator.choice((1, 2, 4, 6, 8, 16)), case))
    program = """
import json, os, sys
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
found = []
for world, case in json.loads(sys.argv[1]):
    os.environ["WORLD_SIZE"] = str(world)
    try:
        sizes = ParallelArguments(**case)
        # What ParallelState makes of them: two meshes that have to fill the world.
        shard = sizes.fully_shard_parallel_size // sizes.ring_attention_size // sizes.ulysses_parallel_size
        mesh = sizes.data_parallel_size // shard * shard * sizes.ulysses_parallel_size * sizes.ring_attention_size
        experts = sizes.expert_parallel_size * sizes.expert_fully_shard_parallel_size
        found.append(mesh == world and experts > 0 and world % experts == 0)
    except (ValueError, ZeroDivisionError):
        found.append(False)
print(json.dumps(found))
"""
    accepted = json.loads(in_host(program, json.dumps(cases)))
    assert 20 < sum(accepted) < 380
    for (world, case), expected in zip(cases, accepted, strict=True):
        sizes = NativeSizes(
            fully_shard=case.get(keys[0]),
            tensor=case.get(keys[1], 1),
            ring=case.get(keys[2], 1),
            ulysses=case.get(keys[3], 1),
            expert=case.get(keys[4], 1),
            expert_fully_shard=case.get(keys[5]),
            data=case.get(keys[6]),
        )
        assert (not refused_sizes(sizes, world, npu=False)) == expected, (world, case, refused_sizes(sizes, world))


def test_every_shipped_file_is_read_and_a_file_that_nothing_changes_keeps_every_byte():
    root = Path(os.environ[SOURCES[0]])
    files = [path for path in sorted(root.rglob("*.yaml")) if is_native(path.read_text("utf-8"))]
    read, refused = 0, []
    for path in files:
        try:
            config = read_native(path)
        except ConfigError as error:
            refused.append(str(error))
            continue
        read += 1
        own = {"parallel.fsdp_plan.apply_modules": config.values.at("parallel.fsdp_plan.apply_modules")}
        own = {key: value for key, value in own.items() if value is not None}
        assert config.with_values(own).encode() == path.read_bytes()
        changed = config.with_values({"training.micro_batch_size": 7, "features.recompute": False})
        assert changed.count("\n") <= config.text.count("\n") + 2
    assert read >= 21 and all("duplicate anchor" in reason for reason in refused), refused


def drawn_lists(generator):
    """Return apply_modules in a drawn order, depths, whether experts are split and whether hooks stand at layers."""
    layers = "model.layers.{*}"
    listed = ["visual", "visual.blocks.{*}", "model.embed", "model", layers, f"{layers}.experts", "lm_head"]
    listed += [f"{layers}.linear"] * generator.randint(0, 1)
    generator.shuffle(listed)
    depths = generator.randint(0, 2), generator.randint(0, 2)
    return listed, depths, generator.random() < 0.5, generator.random() < 0.7


def test_prefetch_lists_are_those_of_the_hosts_own_code_with_and_without_hooks_at_layers():
    generator = random.Random(11)
    cases = [drawn_lists(generator) for _ in range(60)]
    patterns = ["visual", "visual.blocks.{*}", "model", "model.embed", "model.layers.{*}", "lm_head"]
    modules = [ShardedModule(name="", kind="root", pattern="")]
    for pattern in patterns:
        for number in range(3) if "{*}" in pattern else (0,):
            name, parent = pattern.replace("{*}", str(number)), pattern.partition(".")[0] if "." in pattern else ""
            modules.append(
                ShardedModule(name=name, kind="root", pattern=pattern, parent=parent, is_layer="{*}" in pattern)
            )
            if pattern.startswith("model.layers"):
                for part in ("linear", "experts"):
                    inside = {"parent": name, "holds_experts": part == "experts"}
                    modules.append(
                        ShardedModule(name=f"{name}.{part}", kind="root", pattern=f"{pattern}.{part}", **inside)
                    )
    profile = replace(drawn_profile(random.Random(0), 1), modules=tuple(modules), kinds={"root": ModuleKind()})
    program = """
import json, sys
from types import SimpleNamespace
from torch import nn
from mindspeed_mm.fsdp.distributed import fully_shard_parallel as host
class Module(nn.Module):
    def set_modules_to_forward_prefetch(self, ahead):
        self.ahead = ahead
    def set_modules_to_backward_prefetch(self, behind):
        self.behind = behind
found = []
for listed, (forward, backward), split, hooked in json.loads(sys.argv[1]):
    model = Module()
    for name in json.loads(sys.argv[2])[1:]:
        parent, _, last = name.rpartition(".")
        at = model
        for part in filter(None, parent.split(".")):
            if not hasattr(at, part):
                at.add_module(part, Module())
            at = getattr(at, part)
        at.add_module(last, Module())
    experts = [one for one in listed if one.endswith("experts")] if split else []
    plan = SimpleNamespace(
        apply_modules=[one for one in listed if one not in experts], ignored_modules=[],
        hook_modules=["model.layers.{*}"] if hooked else [], num_to_forward_prefetch=forward, num_to_backward_prefetch=backward,
    )
    host.set_modules_to_prefetch(model, plan, SimpleNamespace(apply_efsdp_modules=experts) if split else None)
    names = {module: name for name, module in model.named_modules()}
    found.append({
        name: [[names[one] for one in getattr(module, key, [])] for key in ("ahead", "behind")]
        for name, module in model.named_modules()
    })
print(json.dumps(found))
"""
    theirs = json.loads(in_host(program, json.dumps(cases), json.dumps([one.name for one in modules])))
    for (listed, depths, split, hooked), expected in zip(cases, theirs, strict=True):
        sizes = ShardSizes(num_devices=8, fully_shard_size=8, expert_size=2 if split else 1)
        groups = [GroupChoice(pattern=one, forward_prefetch=depths[0], backward_prefetch=depths[1]) for one in listed]
        decided = ShardedDecisions(
            sizes=replace(sizes, expert_shard_size=4 if split else 1),
            groups=(*groups, GroupChoice(pattern="")),
            hooks=("model.layers.{*}",) if hooked else (),
        )
        lowering = Lowering(Problem(profile, ShardingHost(name="host", variant="mindspeed-mm"), 8), decided)
        names = [one.name for one in lowering.structure.modules]
        for name, unit in zip(names, lowering.units, strict=True):
            lists = [[names[one] for one in row] for row in (unit.forward_prefetch, unit.backward_prefetch)]
            assert lists == expected[name], (listed, depths, split, hooked, name)
