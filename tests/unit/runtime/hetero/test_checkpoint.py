"""Encoders' random states beside a checkpoint: written, taken up in the same layout, named in another."""

import json
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.hetero import checkpoint  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.job import HeteroJob  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.layouts import HeteroLayout, ModuleLayout  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.rng import DefaultGenerators, Generators  # noqa: E402

pytestmark = pytest.mark.torch


class Random:
    """Stands in for the job's generators."""

    def __init__(self):
        self.states = {"image_encoder": self.draw()}

    @staticmethod
    def draw():
        one = lambda: torch.randint(0, 256, (16,), dtype=torch.uint8)
        return Generators(DefaultGenerators(one(), one()), {"model-parallel-rng": one(), "expert": one()})

    def generators(self, name):
        return self.states[name]

    def set_generators(self, name, generators):
        self.states[name] = generators


@pytest.fixture
def job(monkeypatch, tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    made = HeteroJob()
    layout = HeteroLayout(ModuleLayout("text_decoder", "text_decoder", 1, 1, 1), (encoder(tensor=1),))
    values = {"save": str(tmp_path), "load": str(tmp_path), "no_save_rng": False, "no_load_rng": False}
    made.begin(layout, {}, types.SimpleNamespace(**values, finetune=False))
    made.random, made.encoders = Random(), [types.SimpleNamespace(name="image_encoder")]
    monkeypatch.setattr(checkpoint, "current_job", lambda: made)
    # Importing Megatron here would change torch for the whole process.
    name_of = lambda folder, iteration, return_base_dir: f"{folder}/iter_{iteration:07d}"
    host = types.SimpleNamespace(get_checkpoint_name=name_of)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", host)
    (tmp_path / "iter_0000002").mkdir()
    yield made
    torch.distributed.destroy_process_group()


def encoder(tensor):
    return ModuleLayout("image_encoder", "image_encoder", tensor, 1, 1)


def save_checkpoint(iteration, model):
    """The host's."""


def load_checkpoint(model, load_arg="load"):
    """The host's: (step, operations so far)."""
    return 2, 0


def same(one, other):
    pairs = [(one.default.host, other.default.host), (one.default.device, other.default.device)]
    pairs += [(one.tracker[name], other.tracker[name]) for name in one.tracker]
    return all(torch.equal(a, b) for a, b in pairs)


def test_generators_go_on_where_they_stopped(job):
    saved = job.random.states["image_encoder"]
    checkpoint.save(save_checkpoint, (2, None), {})
    job.random.states["image_encoder"] = Random.draw()
    assert checkpoint.load(load_checkpoint, (None,), {}) == (2, 0)
    assert same(job.random.states["image_encoder"], saved)


def test_another_layout_starts_from_the_seed_with_a_log_line(job, capsys):
    checkpoint.save(save_checkpoint, (2, None), {})
    job.layout = HeteroLayout(job.layout.backbone, (encoder(tensor=2),))
    job.random.states["image_encoder"] = now = Random.draw()
    checkpoint.load(load_checkpoint, (None,), {})
    assert job.random.states["image_encoder"] is now
    assert "encoders draw from the seed again" in capsys.readouterr().out


def test_a_checkpoint_of_a_homogeneous_run_has_none_and_loads(job, capsys):
    checkpoint.load(load_checkpoint, (None,), {})
    assert "has no random states of this layout" in capsys.readouterr().out


def test_flags_that_leave_random_states_out_are_obeyed(job, tmp_path):
    job.arguments.no_save_rng = True
    checkpoint.save(save_checkpoint, (2, None), {})
    assert list((tmp_path / "iter_0000002").iterdir()) == []


def test_the_file_has_its_version_and_layout(job, tmp_path):
    checkpoint.save(save_checkpoint, (2, None), {})
    content = json.loads((tmp_path / "iter_0000002" / checkpoint.FILE_NAME).read_text())
    assert content["schema_version"] == 1
    assert content["layout"]["image_encoder"] == {"tp": 1, "pp": 1, "cp": 1}
