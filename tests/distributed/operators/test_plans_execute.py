"""Random plans and the plans of all modes run on four processes as one process does, and send what is predicted."""

import os
from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torch")
pytestmark = [pytest.mark.distributed, pytest.mark.torch]


def _rows(worker, *words):
    return run_ranks(4, Path(__file__).with_name(worker), *words, timeout_s=900)[0].result


def _numbers(short, long):
    """Random plans of each mesh."""
    return pytest.mark.parametrize("number", [short, pytest.param(long, marks=pytest.mark.long)])


@_numbers(8, 30)
def test_random_plans_and_all_modes_match_one_process_and_their_predicted_bytes(number):
    rows = _rows("plan_worker.py", number)
    assert len(rows) == 2 * number + 3
    assert [row for row in rows if row[1] > 1e-12] == []
    assert [row for row in rows if not row[2]] == []
    assert sum(row[3][0] > 0 and row[3][1] > 0 for row in rows) > 5 / 6 * 2 * number


@_numbers(2, 8)
def test_captured_modules_run_by_their_plans_as_one_process_does_and_send_what_is_predicted(number):
    # 1-D and 2-D meshes, random plans and every mode: a fused projection with biases, and grouped heads with a mask.
    rows = _rows("captured_worker.py", number)
    assert len(rows) == 4 * number + 8
    assert [row for row in rows if row[1] > 1e-12] == []
    assert [row for row in rows if not row[2]] == []
    assert sum(row[3][0] > 0 and row[3][1] > 0 for row in rows) == len(rows)


def test_styles_for_parallelize_module_compute_outputs_and_gradients_of_one_process():
    rows = {(name, kind): rest for name, kind, *rest in _rows("parallelize_worker.py")}
    for key, sizes in ((("tensor", "plan"), [1, 4]), (("mixed", "plan"), [2, 2]), (("mixed", "uniform"), [2, 2])):
        found, error, styles, not_expressed = rows[key]
        assert (found, not_expressed) == (sizes, []) and error < 1e-12
        assert styles["layers.1.q"] == styles["head"] == "ColwiseParallel"
        assert styles["layers.0.down"] == styles["table"] == "RowwiseParallel"
    sizes, error, styles, not_expressed = rows["other", "plan"]
    assert error is None and styles == {} and any(": it is cut by " in reason for reason in not_expressed)


@_numbers(1, 3)
def test_layers_of_every_kind_run_by_random_plans_in_train_mode_as_one_process_does(number):
    # Tied and frozen weights, padding rows, dropout, products with vectors, convolutions, recurrent layers, experts.
    rows = _rows("layers_worker.py", number)
    assert len(rows) == 12 * number
    assert [row for row in rows if row[1] > 1e-12] == []
    assert [row for row in rows if not row[2]] == []
    assert [row for row in rows if row[4]] == []


def test_whole_tiny_models_train_as_one_process_does():
    """``OPERATOR_PLANS=2`` for two plans of each."""
    pytest.importorskip("transformers")
    plans = int(os.environ.get("OPERATOR_PLANS", "1"))
    rows = run_ranks(2, Path(__file__).with_name("models_worker.py"), plans, timeout_s=900)[0].result
    print(rows)
    assert len(rows) == 3 * plans
    # DeepSeek-V3 has parts in fp32.
    assert [row for row in rows if not row[3] or row[2] > (1e-6 if row[0] == "DeepSeek-V3" else 1e-12)] == []
    assert all(row[4] > 0 for row in rows)


def test_modules_put_together_at_random_run_as_one_process_does_or_are_refused_in_a_line():
    """``OPERATOR_MODULES=100 OPERATOR_SEED=1`` for the long form."""
    count, seed = os.environ.get("OPERATOR_MODULES", "8"), os.environ.get("OPERATOR_SEED", "0")
    found = run_ranks(2, Path(__file__).with_name("modules_worker.py"), count, seed, timeout_s=1800)[0].result
    rows = found["rows"]
    assert [row for row in rows if row[2] == "raw"] == []
    ran = [row for row in rows if row[2] == "ran"]
    refused = [row for row in rows if row[2] == "refused"]
    print(f"\n{count} modules, seed {seed}: {len(ran)} plans ran, worst error {max(row[3] for row in ran):.1e}")
    print(f"{len(refused)} modules refused")
    assert [row for row in ran if not row[4]] == []
    assert [row for row in ran if not row[3] < 1e-9] == []
    assert all("Doubled" in row[3] or "values of tensors" in row[3] for row in refused), refused
    assert "is for (8, 16)" in found["refusals"]["smaller batch"] or "(6, 16)" in found["refusals"]["smaller batch"]
    assert "is in evaluation mode" in found["refusals"]["evaluation"]
    assert "loader_dims" in found["refusals"]["samples of its own"]
    assert "requires a gradient" in found["refusals"]["input with a gradient"]
    assert max(found["trained"]) < 1e-12
    assert "Copy the module before" in found["refusals"]["copied"]


def _ran_or_refused(kind, count, seed, bound):
    rows = run_ranks(2, Path(__file__).with_name("database_worker.py"), kind, count, seed, timeout_s=7200)[0].result
    assert [row for row in rows if row[1] == "raw"] == []
    ran = [row for row in rows if row[1] == "ran"]
    refused = {row[0]: row[2] for row in rows if row[1] == "refused"}
    names = {row[0] for row in rows}
    print(f"\n{kind}, seed {seed}: {len(ran)} plans of {len(names)} ran, worst error {max(row[2] for row in ran):.1e}")
    print(f"refused: {refused}")
    assert [row for row in ran if not row[2] < bound] == []
    assert [row for row in ran if not row[3]] == []
    return len(names), refused


def test_modules_of_torchs_own_test_database_run_as_one_process_does_and_send_what_is_predicted():
    """``OPERATOR_MODULES=300 OPERATOR_SEED=1`` for the long form."""
    pytest.importorskip("expecttest")
    count, seed = os.environ.get("OPERATOR_MODULES", "12"), os.environ.get("OPERATOR_SEED", "0")
    drawn, refused = _ran_or_refused("torch", count, seed, bound=1e-6)
    assert len(refused) < drawn / 4


@pytest.mark.long
def test_models_of_transformers_run_as_one_process_does_and_send_what_is_predicted():
    pytest.importorskip("transformers")
    # Most compute norms and rotary codes in fp32 whatever the model's type.
    drawn, refused = _ran_or_refused("transformers", "40", os.environ.get("OPERATOR_SEED", "0"), bound=1e-3)
    assert drawn == 40 and len(refused) < 5


@pytest.mark.long
def test_the_distance_of_deepseek_v4_is_that_of_its_parts_in_fp32():
    pytest.importorskip("transformers")
    drawn, refused = _ran_or_refused("deepseek_v4", "1", "0", bound=1e-10)
    assert drawn == 1 and not refused
