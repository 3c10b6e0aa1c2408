"""Megatron's --use-torch-fsdp2 and --use-megatron-fsdp in a launch script: its decisions, a plan's flags,
and refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.host_file import HostFile
from mindspeed_autoparallel.hosts.megatron_fsdp2 import LAYERS
from mindspeed_autoparallel.hosts.opening import open_host_file
from mindspeed_autoparallel.profiles.sharded import ShardedModule
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, GroupChoice

SCRIPT = """#!/bin/bash
MBS=1
MODEL="--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 --swiglu
    --seq-length 4096 --vocab-size 32000 --untie-embeddings-and-output-weights --position-embedding-type rope"
torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL --use-torch-fsdp2 --micro-batch-size $MBS \\
    --global-batch-size 32 --bf16 EXTRA
"""
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 5"
MODULES = tuple(
    ShardedModule(name=f"decoder.layers.{number}", kind="layer", pattern=LAYERS, is_layer=True) for number in range(8)
)


def opened(folder: Path, extra: str = "") -> HostFile:
    path = folder / "train.sh"
    path.write_text(SCRIPT.replace("EXTRA", extra))
    return open_host_file(path)


def without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """Return ``words`` without ``flags`` and their values."""
    for flag in flags:
        at = words.index(flag)
        end = next((end for end in range(at + 1, len(words)) if words[end].startswith("--")), len(words))
        words = words[:at] + words[end:]
    return words


def test_flags_are_read(tmp_path: Path) -> None:
    file = opened(tmp_path, f"{BLOCK} --torch-fsdp2-no-reshard-after-forward")
    decided = file.decisions(MODULES, 8, False)
    assert decided.sizes.label() == "FS8 MBS1 x4"
    assert decided.policies == {LAYERS: (RECOMPUTE,) * 5 + (KEEP,) * 3}
    assert [group.pattern for group in decided.groups] == ["embedding", LAYERS, "output_layer", ""]
    assert not any(group.reshard_after_forward for group in decided.groups)
    uniform = opened(tmp_path, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert uniform.decisions(MODULES, 8, False).policies == {LAYERS: (RECOMPUTE,) * 8}
    assert file.host(False).relisted == ("embedding", "rotary_pos_emb", LAYERS, "output_layer")


def test_drawn_plans_are_read_back_from_their_flags(tmp_path: Path) -> None:
    generator = random.Random(3)
    for _ in range(40):
        extra = " ".join(one for one in (BLOCK, "--torch-fsdp2-no-reshard-after-forward") if generator.random() < 0.5)
        file = opened(tmp_path, extra)
        present = file.decisions(MODULES, 8, False)
        number, reshard = generator.randint(0, 8), generator.random() < 0.5
        micro, context = generator.choice((1, 2)), generator.choice((1, 2))
        sizes = replace(present.sizes, micro_batch_size=micro, ulysses_size=context, accumulation=4 * context // micro)
        wanted = replace(
            present,
            sizes=sizes,
            groups=tuple(GroupChoice(pattern=one.pattern, reshard_after_forward=reshard) for one in present.groups),
            policies={LAYERS: (RECOMPUTE,) * number + (KEEP,) * (8 - number)} if number else {},
        )
        written = file.written(wanted, MODULES)
        words = without(extra.split(), written.left_out)
        again = opened(tmp_path, " ".join([*words, *written.words])).decisions(MODULES, 8, False)
        assert again == wanted, (extra, written)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--tensor-model-parallel-size 2", "no tensor parallelism"),
        ("--expert-model-parallel-size 2", "refuses expert parallelism"),
        ("--recompute-granularity selective", "single operators"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "uniform of 2 layers has no price",
        ),
        ("--context-parallel-size 2", "--cp-comm-type a2a"),
        ("--micro-batch-size $UNKNOWN", "without running it: write the number"),
        ("--global-batch-size 12", "not a multiple of the 8 samples"),
        ("--use-custom-fsdp", "the old name of what --use-megatron-fsdp does"),
        ("--fsdp2-config-path none/fsdp2_config.yaml", "in none of the script's parent folders"),
    ],
)
def test_settings_that_a_plan_cannot_describe_are_named_in_a_line(tmp_path: Path, extra: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        opened(tmp_path, extra).decisions(MODULES, 8, False)
    assert "\n" not in str(error.value)


OWN = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
    "--overlap-param-gather"
)
UNIT = "--suggested-communication-unit-size 300000000"


def own(folder: Path, extra: str = "") -> HostFile:
    """Open the script with Megatron-FSDP in place of torch's."""
    path = folder / "train.sh"
    path.write_text(SCRIPT.replace("--use-torch-fsdp2", OWN).replace("EXTRA", extra))
    return open_host_file(path)


def test_plans_of_megatron_fsdp_are_read_back_from_their_flags(tmp_path: Path) -> None:
    for extra, unit, number in itertools.product(("", UNIT, BLOCK, f"{UNIT} {BLOCK}"), (0, 7 * 10**8), (0, 3, 8)):
        file = own(tmp_path, extra)
        present = file.decisions(MODULES, 8, False)
        assert (present.unit_elements, present.policies) == (
            300_000_000 if UNIT in extra else 0,
            {LAYERS: (RECOMPUTE,) * 5 + (KEEP,) * 3} if BLOCK in extra else {},
        )
        assert [group.pattern for group in present.groups] == ["embedding", LAYERS, ""]  # 65 million: a bucket
        wanted = replace(
            present,
            sizes=replace(present.sizes, micro_batch_size=2, accumulation=2),
            policies={LAYERS: (RECOMPUTE,) * number + (KEEP,) * (8 - number)} if number else {},
            unit_elements=unit,
        )
        written = file.written(wanted, MODULES)
        words = without(extra.split(), written.left_out)
        again = own(tmp_path, " ".join([*words, *written.words])).decisions(MODULES, 8, False)
        assert again == wanted, (extra, written)


def test_a_small_embedding_shares_its_bucket(tmp_path: Path) -> None:
    small = own(tmp_path, "--vocab-size 16000")
    assert [group.pattern for group in small.decisions(MODULES, 8, False).groups] == [LAYERS, ""]
    assert small.host(False).unit_elements == 0
    with pytest.raises(ConfigError, match="shards nothing on one device"):
        small.decisions(MODULES, 1, False)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--data-parallel-sharding-strategy optim", "optim: only optim_grads_params is planned"),
        ("--data-parallel-sharding-strategy optim_grads", "optim_grads: only optim_grads_params is planned"),
        ("--tensor-model-parallel-size 2", "no tensor parallelism"),
        ("--pipeline-model-parallel-size 2", "with --use-megatron-fsdp it is not replayed"),
        ("--expert-model-parallel-size 2", "with --use-megatron-fsdp it is not replayed"),
        ("--num-experts 8", "experts are not replayed"),
        ("--fp8-format hybrid", "fp8 has no price"),
        ("--fp8-param-gather", "fp8 has no price"),
        ("--fsdp-double-buffer", "come from a pool"),
        ("--use-nccl-ub", "come from a pool"),
        ("--outer-dp-sharding-strategy optim", "two groups"),
        ("--num-distributed-optimizer-instances 2", "two groups"),
        ("--megatron-fsdp-version 2", "another implementation"),
        ("--megatron-fsdp-main-grads-dtype fp32", "other types"),
        ("--ddp-bucket-size 1000", "other buckets"),
        ("--torch-fsdp2-no-reshard-after-forward", "a flag of --use-torch-fsdp2"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "is not replayed"),
        ("--position-embedding-type learned_absolute", "a learned position embedding"),
        (f"{UNIT} --suggested-communication-unit-size $UNKNOWN", "write the number"),
    ],
)
def test_unreplayed_settings_of_megatron_fsdp_are_refused_in_a_line(tmp_path: Path, extra: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        own(tmp_path, extra).decisions(MODULES, 8, False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", [*OWN.split()[3:], "--untie-embeddings-and-output-weights"])
def test_flags_without_which_megatron_fsdp_is_not_replayed_are_named(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--use-torch-fsdp2", OWN).replace(flag, ""))
    with pytest.raises(ConfigError, match=f"has no {flag}"):
        open_host_file(path)


def test_a_plan_of_megatron_fsdp_prints_its_flags(tmp_path: Path, capsys) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--use-torch-fsdp2", OWN).replace("EXTRA", BLOCK).replace("layers 8", "layers 48"))
    words = ["plan", "--fsdp2", str(path), "--device", "910B", "--nnodes", "1", "--nproc-per-node", "8"]
    assert main([*words, "--out", str(tmp_path / "planned"), "--time-limit-s", "5"]) == 0
    told = capsys.readouterr()
    assert "Megatron --use-megatron-fsdp" in (tmp_path / "planned" / "plan.json").read_text()
    assert "add to the command line: " in told.err or "remove from it: " in told.err


def test_a_script_beside_a_yaml_gives_the_sizes_that_the_yaml_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "one"
    folder.mkdir(parents=True)
    (folder / "fsdp2_config.yaml").write_text('sharding_size: auto\nsub_modules_to_wrap: ["decoder.layers.{*}"]\n')
    words = "--fsdp2-config-path ./examples/one/fsdp2_config.yaml --context-parallel-size 2 "
    file = opened(folder, words + "--context-parallel-algo ulysses_cp_algo")
    assert (file.path.name, file.described.sequence, file.described.micro_batch_size) == ("fsdp2_config.yaml", 4096, 1)
    decided = file.decisions(MODULES, 8, True)
    assert decided.sizes.label() == "FS8 UL2 MBS1 x8"
    changed = replace(decided, sizes=replace(decided.sizes, micro_batch_size=2, accumulation=4))
    written = file.written(changed, MODULES)
    assert written.words == ("--micro-batch-size 2",)
    assert written.text == (folder / "fsdp2_config.yaml").read_text()


def test_a_plan_recomputes_the_first_layers_where_memory_is_short(tmp_path: Path, capsys) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("EXTRA", BLOCK).replace("--num-layers 8", "--num-layers 64"))
    words = ["plan", "--fsdp2", str(path), "--device", "910B", "--nnodes", "1", "--nproc-per-node", "8"]
    assert main([*words, "--out", str(tmp_path / "planned"), "--time-limit-s", "5"]) == 0
    told = capsys.readouterr()
    assert "Megatron --use-torch-fsdp2" in (tmp_path / "planned" / "plan.json").read_text()
    assert not (tmp_path / "planned" / "train.sh").exists()
    assert "add to the command line: " in told.err or "remove from it: " in told.err
    assert main([*words, "--model", "config.json"]) == 2
    assert "--model has no meaning" in capsys.readouterr().err
