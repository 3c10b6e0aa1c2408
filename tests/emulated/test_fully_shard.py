"""torch's own fully_shard on a virtual clock against the replay: every operation, its queue, its start and its end."""

import json
import os
import subprocess
from pathlib import Path

import emulated_fsdp
import pytest
from emulated_fsdp.drawn import deferring_training, drawn_training
from forked_python import forked_python
from how_many import how_many

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.hosts.opening import open_host_file
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.pricing import layer_policies
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.predict.megatron_arguments import model_of_arguments
from mindspeed_autoparallel.predict.sharded_profile import megatron_profile
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


def test_random_trainings_take_as_long_as_in_torch():
    trainings = [drawn_training(seed) for seed in range(how_many(40, 100))]
    compare(trainings, by_torch(trainings))


def test_trainings_that_reduce_or_free_once_a_step_take_as_long_as_in_torch():
    """With ``set_requires_gradient_sync``, ``set_reshard_after_backward`` or both, as NeMo Automodel and VeOmni."""
    trainings = [deferring_training(seed) for seed in range(how_many(30, 100))]
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


def test_megatron_wraps_and_lists_units_as_planned(tmp_path):
    """Megatron's own TorchFullyShardedDataParallel around a GPT model of three layers, two of them recomputed."""
    script = Path(emulated_fsdp.__file__).with_name("megatron_units.py")
    done = subprocess.run([forked_python(), str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    launch = tmp_path / "train.sh"
    launch.write_text(
        "torchrun pretrain_gpt.py --use-torch-fsdp2 --num-layers 3 --hidden-size 16 --num-attention-heads 2 "
        "--vocab-size 32 --seq-length 8 --untie-embeddings-and-output-weights --position-embedding-type rope "
        "--transformer-impl local --recompute-granularity full --recompute-method block --recompute-num-layers 2\n"
    )
    file = open_host_file(launch)
    profile = megatron_profile(model_of_arguments(file.arguments), file.described, find_device("H100"), 8)
    problem = Problem(profile, file.host(False), 8)
    decisions = file.decisions(profile.modules, 8, False)
    lowering = Lowering(problem, decisions)
    for kind, policies in (("recomputed", layer_policies(problem, decisions)), ("kept", {})):
        units = lowering.training(policies).units
        names = [unit.name.removeprefix("root") for unit in units]
        assert set(names) == set(theirs[kind]) - {"rotary_pos_emb"}
        for name, unit in zip(names, units, strict=True):
            # A unit without parameters gathers nothing; a unit that lists itself does neither.
            expected = [one if one in names else name for one in theirs[kind][name]]
            assert [names[one] for one in unit.backward_prefetch] == expected, name
