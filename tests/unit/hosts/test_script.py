"""A launch script is read without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.script import parse_script, read_script

SCRIPT = r"""#!/bin/bash
export TASK_QUEUE_ENABLE=2
export PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"
NPUS_PER_NODE=8
MASTER_PORT=6010 # free
NNODES=2
export NNODES
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=4
PP=2
DP=$(($WORLD_SIZE/$TP/$PP))
# TP=16
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --sequence-parallel \
    --clip-grad -1.0 \
    --global-batch-size $(($DP*32)) \
"
python -u pretrain_vlm.py \
    $GPT_ARGS --auto-parallel-mm \
    --nproc-per-node $NPUS_PER_NODE --save=out \
    | tee logs/train.log 2>&1
chmod 440 logs/train.log
"""


def test_a_comment_ends_with_its_line_even_after_a_backslash() -> None:
    text = (
        '# --trust-remote-code \\\nARGS="--save out \\\n    # --more \\\n    --lr 1"\ntorchrun \\\n    train.py $ARGS\n'
    )
    script = parse_script(text)
    assert (script.program, script.given("--save"), script.given("--lr")) == ("train.py", "out", "1")


def test_variables_are_followed_into_flags() -> None:
    script = parse_script(SCRIPT)
    assert script.exports == {
        "TASK_QUEUE_ENABLE": "2",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "NNODES": "2",
    }
    assert script.variables["DP"] == "2"
    assert script.variables["MASTER_PORT"] == "6010"
    assert script.flags["--tensor-model-parallel-size"] == "4"
    assert script.flags["--sequence-parallel"] == ""
    assert script.flags["--clip-grad"] == "-1.0"
    assert script.flags["--global-batch-size"] == "64"
    assert script.flags["--save"] == "out"
    assert script.number("--nproc-per-node") == 8
    assert script.launcher == "python"


def test_values_that_need_a_run_of_the_script_are_none() -> None:
    script = parse_script("python t.py --nnodes $(hostname | wc -l)")
    assert script.number("--nnodes") is None
    assert script.number("--master-port", 3) == 3


def test_both_spellings_of_a_flag_count() -> None:
    script = parse_script("torchrun --nproc_per_node 4 t.py")
    assert script.number("--nproc-per-node") == 4
    assert script.launcher == "torchrun"


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.sh"):
        read_script(tmp_path / "none.sh")


ARRAYS = r"""
set -e
PORT=${MASTER_PORT:-6000}
GPUS=${GPUS_PER_NODE:-$((4 * 2))}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS
    --nnodes ${NNODES:-1}   # one node
    --master_port "$PORT"
)
MODEL_ARGS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --step-batch-size-schedule "0:16 2.4B:320")
MODEL_ARGS+=(--tensor-model-parallel-size 7)
if [ "$USE_SP" = 1 ]; then
    MODEL_ARGS+=(--sequence-parallel --context-parallel-size 2)
fi
cat <<END
--tensor-model-parallel-size 16
END
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "$@" 2>&1 | tee log
"""


def test_arrays_defaults_and_positional_words_are_followed() -> None:
    script = parse_script(ARRAYS)
    assert script.flags["--nproc_per_node"] == "8"
    assert script.flags["--master_port"] == "6000"
    assert script.flags["--step-batch-size-schedule"] == "0:16 2.4B:320"
    assert (script.number("--tensor-model-parallel-size"), script.number("--nnodes")) == (7, 1)
    assert script.number("--micro-batch-size", 3) == 3
    assert (script.launcher, script.program) == ("torchrun", "pretrain_gpt.py")


def test_words_that_a_condition_adds_are_unknown() -> None:
    script = parse_script(ARRAYS)
    assert script.number("--context-parallel-size") is None
    changed = parse_script("TP=2\nif true; then TP=4; fi\npython t.py --tensor-model-parallel-size $TP --nnodes 2")
    assert (changed.number("--tensor-model-parallel-size"), changed.number("--nnodes")) == (None, 2)


def test_flags_in_an_unset_variable_leave_the_others_unknown() -> None:
    script = parse_script("torchrun --nproc-per-node 8 t.py --tensor-model-parallel-size 2 $EXTRA_ARGS")
    assert script.unread == ("$EXTRA_ARGS",)
    assert script.number("--tensor-model-parallel-size") == 2
    assert script.number("--pipeline-model-parallel-size") is None


@pytest.mark.parametrize(
    "line", ["source conf/sizes.sh", '. "$(dirname $0)/conf/sizes.sh"', "source ${HERE}/conf/sizes.sh"]
)
def test_sourced_files_are_read_beside_the_script(tmp_path: Path, line: str) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "sizes.sh").write_text("TP=4\nARGS=(--tensor-model-parallel-size $TP)\n")
    (tmp_path / "run.sh").write_text(f"HERE=$(cd $(dirname $0) && pwd)\n{line}\npython t.py ${{ARGS[@]}}\n")
    assert read_script(tmp_path / "run.sh").number("--tensor-model-parallel-size") == 4


@pytest.mark.parametrize(
    "start",
    [
        'srun -l bash -c "torchrun --nproc-per-node 4 t.py --seed 1"',
        "CMD='torchrun --nproc-per-node 4 t.py'\neval $CMD --seed 1",
        "NCCL_DEBUG=INFO nohup python3 -m torch.distributed.launch --nproc_per_node=4 t.py --seed 1 > log 2>&1 &",
    ],
)
def test_starts_inside_other_commands_are_found(start: str) -> None:
    script = parse_script(start)
    assert (script.launcher, script.number("--nproc-per-node"), script.number("--seed")) == ("torchrun", 4, 1)


@pytest.mark.parametrize("text", ["", "'", '"', "${", "$((", "`", "(", "A=(", "x\\", "<<E\n", 'a "$(b "c")" d', "\0"])
def test_broken_scripts_are_read_as_far_as_they_go(text: str) -> None:
    assert parse_script(text).flags == {}


@pytest.mark.parametrize(
    "text, error",
    [
        ('X="' + "$(" * 50_000 + '"', "more than 100 deep"),
        ("X=" + "${a" * 50_000, "more than 100 deep"),
        ('X="' + "$((" * 50_000 + '"', "more than 100 deep"),
        ("A=1\n" + 'A="$A$A"\n' * 60, "appended to itself"),
        ("A=(1 1)\n" + "A=(${A[@]} ${A[@]})\n" * 60, "appended to itself"),
        ('A="' + "x" * 100_000 + '"\n' + "torchrun $A\n" * 1000, "in all"),
        ("A=1\n" + 'A+="$A"\n' * 60, "appended to itself"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_script_that_grows_or_nests_without_end_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_script(text + "\ntorchrun train.py --lr 1\n")


@pytest.mark.parametrize(
    "text",
    ["cat <<A\n" * 20_000, 'X="' + "\\$(" * 40_000 + '"\n', "X=$((" + "1+" * 30_000 + "1))\n", "ls $a1 " * 20_000],
    ids=["documents", "escaped", "sum", "words"],
)
def test_a_script_of_a_mebibyte_is_read_without_looking_at_it_again_for_every_word(text: str) -> None:
    assert parse_script(text + "\ntorchrun train.py --lr 1 $MORE $MORE\n").flags["--lr"] == "1"


def test_a_script_that_sources_itself_many_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("source ./train.sh\n" * 50 + "torchrun train.py\n")
    with pytest.raises(ConfigError, match="source itself"):
        read_script(path)


def test_documents_are_no_commands_and_here_strings_are() -> None:
    script = parse_script(
        "cat <<-'END' > x\n torchrun other.py --lr 2 --lr 3\n END\nread A <<< END\ntorchrun train.py --lr 1\nEND\n"
    )
    assert script.flags == {"--lr": "1"}


def test_a_backslash_ends_no_comment() -> None:
    """Bash ends a comment at its line; what follows is the script's again."""
    script = parse_script(
        "# --trust-remote-code \\\nARGS='--lr 1'\nMORE=(--a 1 # \\\n --b 2)\n"
        'torchrun t.py $ARGS "${MORE[@]}" \\\n --c 3 \\\n # --d 4 \\\n --e 5\n'
    )
    assert script.flags == {"--lr": "1", "--a": "1", "--b": "2", "--c": "3"}
