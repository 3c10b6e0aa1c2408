"""``mindspeed-autoparallel calibrate``: one launch on real processes fills the knowledge base."""

import json
import os
import subprocess

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.planner.tuner.links import fitted_tiers
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase

pytestmark = [pytest.mark.distributed, pytest.mark.torch]
PRODUCT = '[[{"dtype":"float32","order":[0,1]},{"dtype":"float32","order":[0,1]}],{"map":{}}]'


def calibrate(*words, **environment):
    return subprocess.run(
        [forked_python(), "-m", "mindspeed_autoparallel", "calibrate", *map(str, words)],
        text=True,
        capture_output=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", **environment},
    )


def test_operators_and_collectives_are_added_and_failures_named(tmp_path):
    operators = tmp_path / "operators.json"
    calls = [
        {"name": "aten.mm.default", "signature": PRODUCT, "sizes": sizes} for sizes in ([16, 8, 8, 16], [4, 5, 6, 7])
    ]
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
        (("--processes", 0), "must be a whole number of at least 1"),
        (("--operators", "none.json"), "cannot read list of operators"),
    ],
)
def test_bad_input_is_named_before_a_launch(tmp_path, words, said):
    run = calibrate(tmp_path / "base.sqlite", *words)
    assert (run.returncode, said in run.stderr, "Traceback" in run.stderr) == (2, True, False), run.stderr


def test_a_launch_that_dies_keeps_its_finished_results(tmp_path):
    """The second operator ends the process, as a driver might."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ:\n"
        "    from mindspeed_autoparallel.runtime.profiling.calibrate import replay, worker\n"
        "    worker._SAVE_EVERY_S, times = 0, replay._times\n"
        "    replay._times = lambda operator, *rest: os._exit(9) if operator.sizes[0] == 13 else times(operator, *rest)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    operators = tmp_path / "operators.json"
    calls = [{"name": "aten.mm.default", "signature": PRODUCT, "sizes": [rows, 8, 8, 16]} for rows in (16, 13, 17)]
    operators.write_text(json.dumps({"operators": calls}))
    run = calibrate(tmp_path / "base.sqlite", "--operators", operators, PYTHONPATH=path)
    assert (run.returncode, "Traceback" in run.stderr) == (2, False), run.stderr[-3000:]
    assert "exit code 9" in run.stderr
    assert "1 operators and 0 samples of collectives that it had finished are in" in run.stderr
    (found,) = KnowledgeBase(tmp_path / "base.sqlite").entries()
    assert found[2].sizes == (16, 8, 8, 16)
