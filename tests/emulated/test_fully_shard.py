"""torch's own fully_shard on a virtual clock against the replay: every operation, its queue, its start and its end."""

import json
import os
import subprocess
from pathlib import Path

import emulated_fsdp
import pytest
from emulated_fsdp.drawn import drawn_training
from forked_python import forked_python

from mindspeed_autoparallel.schedule.sharded import replay
from mindspeed_autoparallel.spec.codec import to_json

pytestmark = [pytest.mark.emulated, pytest.mark.torch]
CLOCK = Path(emulated_fsdp.__file__).with_name("clock_main.py")


def by_torch(trainings, python=None, host=()):
    """What torch does in each of ``trainings``, in one process; ``host``: a host's own copy of fully_shard."""
    text = json.dumps([to_json(training) for training in trainings])
    done = subprocess.run(
        [python or forked_python(), str(CLOCK), *host], input=text, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compare(trainings, outcomes):
    for seed, (training, outcome) in enumerate(zip(trainings, outcomes, strict=True)):
        ours = replay(training, with_spans=True)
        spans = [[queue, list(what), start, end] for queue, what, start, end in ours.spans if what != "optimizer"]
        assert spans == outcome["spans"], f"case {seed}"
        assert ours.step_ns == outcome["step_ns"], f"case {seed}"


def test_a_hundred_random_trainings_take_as_long_as_torch_says():
    trainings = [drawn_training(seed) for seed in range(100)]
    compare(trainings, by_torch(trainings))


@pytest.mark.parametrize("variant", ["torch-2.7", "mindspeed-mm"])
def test_older_rules(variant):
    """torch 2.7 and MindSpeed-MM's patched copy of it, where an interpreter with torch 2.7.1 and the host are given."""
    python, host = os.environ.get("TORCH27_PYTHON"), os.environ.get("MINDSPEED_MM")
    if not python or (variant == "mindspeed-mm" and not host):
        pytest.skip("TORCH27_PYTHON names no interpreter with torch 2.7.1, or MINDSPEED_MM no checkout")
    patched = [f"{host}/mindspeed_mm/fsdp/ops/fully_shard/fully_shard.py"] if variant == "mindspeed-mm" else []
    trainings = [drawn_training(seed, variant) for seed in range(100)]
    compare(trainings, by_torch(trainings, python, patched))
