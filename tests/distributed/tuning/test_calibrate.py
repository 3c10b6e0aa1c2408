"""``mindspeed-autoparallel calibrate``: one launch on real processes fills the knowledge base."""

import json
import os
import subprocess
import sys

import pytest

from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.tuning.traced.links import fitted_tiers

pytestmark = [pytest.mark.distributed, pytest.mark.torch]
PRODUCT = '[[{"dtype":"float32","order":[0,1]},{"dtype":"float32","order":[0,1]}],{"map":{}}]'


def calibrate(*words):
    return subprocess.run(
        [sys.executable, "-m", "mindspeed_autoparallel", "calibrate", *map(str, words)], text=True,
        capture_output=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"},
    )  # fmt: skip


def test_operators_and_collectives_are_added_and_failures_named(tmp_path):
    operators = tmp_path / "operators.json"
    calls = [{"name": "aten.mm.default", "signature": PRODUCT, "sizes": sizes} for sizes in ([16, 8, 8, 16], [4, 5, 6, 7])]
    operators.write_text(json.dumps({"operators": calls}))
    run = calibrate(tmp_path / "base.sqlite", "--operators", operators, "--processes", 2, "--json")
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout)
    assert (result["num_operators"], len(result["failed"])) == (1, 1)
    tiers = fitted_tiers(KnowledgeBase(tmp_path / "base.sqlite"), result["device"], result["software"])
    assert list(tiers) == ["intra"]
    assert {"p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"} <= set(tiers["intra"].operations)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to measure"),
        (("--processes", 0), "must be at least 1"),
        (("--operators", "none.json"), "cannot read list of operators"),
    ],
)
def test_bad_input_is_named_before_a_launch(tmp_path, words, said):
    run = calibrate(tmp_path / "base.sqlite", *words)
    assert (run.returncode, said in run.stderr, "Traceback" in run.stderr) == (2, True, False), run.stderr
