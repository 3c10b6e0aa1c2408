"""Pictures, tones and records -> samples and microbatches. These modules import megatron's position code: one process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python
from script_ranks import PATH

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("PIL")

pytestmark = [pytest.mark.torch, pytest.mark.megatron]

# Importing megatron on a machine without an accelerator patches torch for the whole process: keep it out of this one.
PROGRAM = Path(__file__).parent / "samples_program.py"


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    done = subprocess.run(
        [forked_python(), str(PROGRAM)],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line[0]: line[1] for line in lines}


@pytest.mark.parametrize(
    "check",
    [
        "fitting sizes are multiples within the bounds",
        "patches equal a slow cut",
        "windows equal a slow cut",
        "labels are the next wanted tokens",
        "every image has as many tokens as merged patches",
        "a missing mark names the sample",
        "a picture that does not fit names the sample",
        "broken media name the sample",
        "positions go on after the longer side",
        "a batch without media has a stand-in",
        "ranks together see the same samples as one",
        "tones have frames and tokens",
        "sizes by headers are those of the samples",
        "index files of Megatron are read",
        "a rearranged batch has the samples of its global batch and trains on where it stopped",
        "packed texts lie one after another with their own positions and labels",
        "a sample beyond the limit of tokens is named, a batch beyond it is trained",
        "packs filled to a length hold any number of samples within it",
        "rearranging makes work even, and says how even",
        "put_at_tokens keeps the order of samples",
    ],
)
def test_samples(outcome: dict[str, str], check: str) -> None:
    assert outcome[check] == "ok"


def test_every_check_of_the_program_is_listed(outcome: dict[str, str]) -> None:
    assert len(outcome) == 20
