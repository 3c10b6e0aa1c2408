"""Peaks that the replay gives measured profiles, beside the live storages of real trainings under fully_shard."""

import json
import os
import subprocess
from pathlib import Path

import emulated_fsdp
import pytest
from forked_python import forked_python
from how_many import how_many

pytestmark = [pytest.mark.emulated, pytest.mark.torch]
PROGRAM = Path(emulated_fsdp.__file__).with_name("peaks_main.py")


def compare(seeds, python=None):
    """Train every seed's model twice: once to measure it, and once under drawn decisions."""
    command = [python or forked_python(), "-W", "ignore", str(PROGRAM), *map(str, seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == len(seeds)
    for case in cases:
        for moment, (predicted, live) in case["bytes"].items():
            assert predicted == pytest.approx(live, rel=0.01), (moment, case)


def test_peaks_equal_live_storages():
    compare(range(how_many(3, 6)))


def test_peaks_of_reentrant_recomputation_equal_live_storages():
    compare((1000, 1006, 1010))


def test_peaks_of_micro_batches_in_parts_equal_live_storages():
    compare((2001, 2003, 2021, 2048, 2049, 2083))


def test_peaks_of_trainings_that_reduce_or_free_once_a_step_equal_live_storages():
    compare((3000, 3008, 3017))


def test_peaks_of_experts_hooked_at_their_layer_equal_live_storages():
    """MindSpeed-MM's ``hook_modules``, where an interpreter with torch 2.7.1 and the host are given."""
    python = os.environ.get("TORCH27_PYTHON")
    if not python or "MINDSPEED_MM" not in os.environ:
        pytest.skip("TORCH27_PYTHON names no interpreter with torch 2.7.1, or MINDSPEED_MM no checkout")
    compare((4000, 4001, 4004, 4015), python)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sixty_four_peaks_equal_live_storages():
    compare(range(64))
