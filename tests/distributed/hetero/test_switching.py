"""Switching parallel_state online: five layouts in one job on four ranks, on every supported Megatron."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.timeout(1200), pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]

_spec = importlib.util.spec_from_file_location("hetero_launching", Path(__file__).with_name("launching.py"))
launching = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launching)


@pytest.mark.parametrize("release", ["", "0_12", "0_16"], ids=["installed", "0.12", "0.16"])
def test_random_switches_restore_groups_ranks_and_random_states(release):
    path = os.environ.get(f"MEGATRON_CORE_{release}") if release else None
    if release and not path:
        pytest.skip(f"MEGATRON_CORE_{release} does not name a folder with that release")
    rounds = 1  # that are timed: of no interest here
    output = launching.launch("switching.py", 4, rounds, megatron_path=path)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[len("RESULT ") :])
    # rank 0: tensor rank, pipeline size, data rank, virtual size, and the sums of rank+1 over tp, dp-cp, cp groups
    assert found["layouts"] == {
        "dp4": [0, 1, 0, None, 1.0, 10.0, 1.0],
        "tp2": [0, 1, 0, None, 3.0, 4.0, 1.0],
        "tp2pp2": [0, 2, 0, None, 3.0, 1.0, 1.0],
        "cp2": [0, 1, 0, None, 1.0, 10.0, 3.0],
        "pp2vp2": [0, 2, 0, 2, 1.0, 3.0, 1.0],
    }
    assert found["good_probes"] == 200
    assert found["restored_after_exception"] is True
    assert found["virtual_rank_written_back"] == 1
    assert found["outer_virtual_rank"] is None
    assert found["globals_equal_afterwards"] is True
    assert "there are dp4, tp2" in found["unknown"]
    requested, created = found["groups"]
    assert created < requested
    for rank, (first, outside, second, third) in enumerate(found["draws"]):
        assert len({first, second, third}) == 3, "a module's generator continues where it stopped"
        assert (first == found["draws"][0][0]) == (rank % 2 == 0), "seeded by the module's own tensor rank"
        assert outside == found["draws"][0][1]
