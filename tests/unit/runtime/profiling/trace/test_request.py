"""What can be traced is checked before a process is started."""

import itertools
import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.profiling.trace.request import read_request

_LAYER = {"hidden": 64, "heads": 4, "sequence": 32}
_STAGE = {**_LAYER, "block": "stage", "vocabulary": 256, "num_layers": 4, "pipeline": 2}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**_LAYER, "colour": 1}, "unknown keys"),
        ({"hidden": 64}, "missing: heads, sequence"),
        ({**_LAYER, "hidden": 65}, "not divisible by heads"),
        ({**_LAYER, "tensor": 3}, "heads 4 is not divisible by tensor 3"),
        ({**_LAYER, "sequence": 34, "context": 4}, "2 x context"),
        ({**_LAYER, "tensor": 0}, "tensor is 0"),
        ({**_LAYER, "tensor": True}, r"the block to trace cannot be used: Expected `int`, got `bool` - at `\$.tensor`"),
        ({**_LAYER, "gated": 1}, "Expected `bool`, got `int`"),
        ({**_LAYER, "kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ({**_LAYER, "kv_heads": -1}, "kv_heads is -1, must be at least 0"),
        ({**_LAYER, "block": "norm"}, "must be one of layer"),
        ({**_LAYER, "block": "head"}, "vocabulary is needed"),
        ({**_LAYER, "expert": 2}, "needs num_experts"),
        ({**_LAYER, "num_experts": 3, "expert": 2}, "not divisible by expert 2"),
        ({**_LAYER, "num_experts": 4, "topk": 5}, "topk 5"),
        ({**_LAYER, "num_experts": 4, "tensor": 2}, "need sequence_parallel"),
        ({**_LAYER, "world": 3, "tensor": 2}, "world 3"),
        ({**_STAGE, "num_layers": 3}, "cannot be split over pipeline 2"),
        ({**_STAGE, "stage": 2}, "below pipeline 2"),
        ({**_STAGE, "virtual": 2, "num_microbatches": 3}, "multiples of pipeline 2"),
    ],
)
def test_an_impossible_request_is_refused_with_the_rule(values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_request(values)


@pytest.mark.parametrize(
    ("values", "ranks", "rank"),
    [
        ({"tensor": 2, "context": 2}, 4, 0),
        ({"num_experts": 8, "expert": 4, "tensor": 2, "sequence_parallel": True}, 8, 0),
        ({"num_experts": 8, "expert": 4, "tensor": 2, "sequence_parallel": True, "expert_tensor": 1}, 4, 0),
        ({**_STAGE, "tensor": 2, "stage": 1}, 4, 2),
    ],
)
def test_the_smallest_world_holds_the_layout_and_the_rank_is_the_first_of_its_stage(
    values: dict, ranks: int, rank: int
) -> None:
    request = read_request({**_LAYER, **values})
    assert (request.num_ranks, request.rank) == (ranks, rank)


def test_the_command_refuses_bad_sizes_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--hidden", "65", "--heads", "4", "--seq-length", "32"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("ConfigError: hidden 65 is not divisible by heads 4")
    assert not printed.out


@pytest.mark.parametrize(
    "words", [("--hidden", "64", "--heads", "4", "--seq-length", "32"), ("--script", __file__)], ids=["block", "script"]
)
def test_the_cache_is_checked_before_anything_is_traced(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was found to be a file after the trace, which takes minutes for a large model."""
    (tmp_path / "file").touch()
    assert main(["trace", *words, "--cache", str(tmp_path / "file")]) == 2
    assert f"--cache {tmp_path / 'file'} cannot be a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tp-size 2 --world 3", "world 3 is not a multiple of tensor 2 x context 1"),
        ("--tp-size 2 --cp-size 2 --world 6", "world 6 is not a multiple of tensor 2 x context 2"),
        ("--ep-size 4 --world 6", "world 6 is not a multiple of expert 4"),
    ],
)
def test_a_world_that_does_not_hold_the_layout_is_refused_before_the_script_starts(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--script", __file__, *words.split()]) == 2
    assert said in capsys.readouterr().err


_BLOCKS = {
    "layer": [],
    "layer with experts": ["--num-experts", "4", "--ep-size", "2"],
    "embedding": ["--block", "embedding", "--vocabulary", "512"],
    "head": ["--block", "head", "--vocabulary", "512"],
    "stage": ["--block", "stage", "--vocabulary", "512", "--num-layers", "4", "--pp-size", "2"],
}
_FLAGS = (
    *("--hidden 128", "--heads 8", "--seq-length 64", "--micro-batch 2", "--kv-heads 2", "--head-size 8", "--ffn 128"),
    *("--vocabulary 1024", "--num-experts 8", "--topk 1", "--expert-ffn 32", "--shared-ffn 32", "--tp-size 2"),
    *("--cp-size 2", "--ep-size 4", "--etp-size 2", "--num-layers 8", "--pp-size 4", "--vpp-size 2", "--stage 1"),
    *("--num-microbatches 4", "--gated", "--sequence-parallel", "--recompute full", "--dtype float32"),
)
_WITHOUT_EFFECT = {("embedding", "--heads 8"), ("head", "--heads 8")}
"""Sizes that every block must be given."""


@pytest.mark.parametrize(
    "words",
    [
        "--vocabulary 512",
        "--num-layers 4",
        "--num-microbatches 2",
        "--topk 1",
        "--sequence-parallel",
        "--recompute full:2",
        "--block head --vocabulary 512 --ffn 128",
        "--block embedding --vocabulary 512 --gated",
    ],
)
def test_a_flag_that_the_block_does_not_read_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--hidden", "64", "--heads", "4", "--seq-length", "32", *words.split()]) == 2
    assert [word for word in words.split() if word.startswith("--")][-1] in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.parametrize(("block", "flag"), list(itertools.product(_BLOCKS, _FLAGS)))
def test_a_flag_changes_the_trace_or_is_refused(
    block: str, flag: str, capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = str(tmp_path_factory.getbasetemp() / "traces")
    plain = ["trace", "--hidden", "64", "--heads", "4", "--seq-length", "32", *_BLOCKS[block], "--json", "--quiet"]
    assert main([*plain, "--cache", cache]) == 0
    before = json.loads(capfd.readouterr().out)
    if main([*plain, *flag.split(), "--cache", cache]) == 0:
        changes = json.loads(capfd.readouterr().out) != before
        assert changes or (block, flag) in _WITHOUT_EFFECT
    else:
        assert "ConfigError" in capfd.readouterr().err
