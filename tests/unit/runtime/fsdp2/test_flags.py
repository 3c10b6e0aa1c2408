"""Flags behind the YAML's name: read, checked, and misspelt ones refused, as the trainer ignores words with dashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.fsdp2.flags import read_native_flags

CLUSTER = ["--simulated-nnodes", "2", "--simulated-nproc-per-node=8"]


def test_flags_are_read_beside_words_of_the_trainer() -> None:
    request = read_native_flags(["c.yaml", "x=1", "--auto-parallel-mm", *CLUSTER, "--other", "5"])
    assert (
        request.search.auto_parallel_mm
        and request.plan is None
        and (request.num_nodes, request.devices_per_node) == (2, 8)
    )
    assert read_native_flags(["c.yaml", "--auto-parallel-plan", "p.json"]).plan == Path("p.json")
    assert not read_native_flags(["c.yaml"]).search.auto_parallel_mm
    checked = read_native_flags(
        ["c.yaml", "--auto-parallel-preflight", "p.json", "--auto-parallel-preflight-ranks", "3"]
    )
    assert checked.is_preflight and checked.plan == Path("p.json")
    assert checked.preflight.auto_parallel_preflight_ranks == "3"
    own = read_native_flags(["c.yaml", "--auto-parallel-preflight", *CLUSTER])
    assert own.is_preflight and own.plan is None and own.devices_per_node == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--auto-parallel-mm"], "needs --simulated-nnodes"),
        (["--auto-parallel-mm", *CLUSTER, "--auto-parallel-plan", "p"], "exclude each other"),
        (["--auto-paralel-mm", *CLUSTER], "nearest is --auto-parallel-mm"),
        (["--auto-parallel-preflight"], "--auto-parallel-preflight needs --simulated-nnodes"),
        (["--auto-parallel-preflight", "p", "--auto-parallel-plan", "p"], "exclude each other"),
        (["--auto-parallel-preflight", "p", "--auto-parallel-preflight-steps", "2"], "at least 3, got '2'"),
        (["--auto-parallel-preflight", "p", "--auto-parallel-preflight-imbalance", "nan"], "at least 1, got nan"),
        (["--auto-parallel-memory-limit-mib", "-1", "--auto-parallel-preflight", "p"], "must be above 0 .* got -1"),
        (["--auto-tuning"], "not a flag of the native"),
        (["--simulated-nnodes", "two"], "must be a whole number of at least 1, got 'two'"),
        (["--auto-parallel-plan", "p", "--auto-parallel-check-steps", "0"], "at least 1"),
    ],
)
def test_flags_that_cannot_be_are_refused_in_a_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_native_flags(["c.yaml", *words])
    assert "\n" not in str(error.value)
