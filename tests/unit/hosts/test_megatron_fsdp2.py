"""Megatron's --use-torch-fsdp2 from a launch script: what it decides, a plan's flags, and what is refused."""

from __future__ import annotations

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
        words = extra.split()
        for flag in written.left_out:
            at = words.index(flag)
            end = next((end for end in range(at + 1, len(words)) if words[end].startswith("--")), len(words))
            del words[at:end]
        again = opened(tmp_path, " ".join([*words, *written.words])).decisions(MODULES, 8, False)
        assert again == wanted, (extra, written)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--tensor-model-parallel-size 2", "no tensor parallelism"),
        ("--expert-model-parallel-size 2", "refuses expert parallelism"),
        ("--recompute-granularity selective", "single operators"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "2 layers at once"),
        ("--context-parallel-size 2", "--cp-comm-type a2a"),
        ("--micro-batch-size $UNKNOWN", "without running it: write the number"),
        ("--global-batch-size 12", "not a multiple of the 8 samples"),
        ("--use-megatron-fsdp", "its order was read and not replayed"),
        ("--fsdp2-config-path none/fsdp2_config.yaml", "in none of the script's parent folders"),
    ],
)
def test_what_a_plan_cannot_describe_is_named_in_a_line(tmp_path: Path, extra: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        opened(tmp_path, extra).decisions(MODULES, 8, False)
    assert "\n" not in str(error.value)


def test_a_script_beside_a_yaml_gives_the_sizes_that_the_yaml_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "one"
    folder.mkdir(parents=True)
    (folder / "fsdp2_config.yaml").write_text('sharding_size: auto\nsub_modules_to_wrap: ["decoder.layers.{*}"]\n')
    words = "--fsdp2-config-path ./examples/one/fsdp2_config.yaml --context-parallel-size 2 "
    file = opened(folder, words + "--context-parallel-algo ulysses_cp_algo")
    assert (file.path.name, file.tokens, file.micro_batch) == ("fsdp2_config.yaml", 4096, 1)
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
