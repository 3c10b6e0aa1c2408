"""--hetero-parallel before anything is built: the arguments that it sets, and its refusals."""

import argparse
import json

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.hetero_parallel import entry
from mindspeed_autoparallel.runtime.hetero.job import HeteroJob

MODEL = {
    "image_encoder": {"vision_encoder": {"num_attention_heads": 4, "tp": 1, "pp": 1, "cp": 1}},
    "audio_encoder": {"tp": 2, "mbs": 4},
    "text_decoder": {"num_attention_heads": 4, "tp": 2, "pp": 2},
}


@pytest.fixture
def job(monkeypatch):
    begun = HeteroJob()
    monkeypatch.setattr(entry, "current_job", lambda: begun)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "1")
    return begun


def arguments(tmp_path, model=MODEL, **changes):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(model))
    values = {
        "mm_model": str(file),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "hetero_encoder_mbs_scale": 3,
    }
    return argparse.Namespace(**{**values, **changes})


def test_the_backbones_sizes_become_the_hosts_arguments(job, tmp_path):
    given = arguments(tmp_path)
    entry.prepare(given)
    assert (given.tensor_model_parallel_size, given.pipeline_model_parallel_size) == (2, 2)
    assert given.global_batch_size == 16
    assert job.scales == {"image_encoder": 3, "audio_encoder": 2}
    assert set(job.own_pipelines) == {"image_encoder", "audio_encoder"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_model": None}, "give it with --mm-model"),
        ({"tensor_model_parallel_size": 2}, r"the script sets TP 2, PP 1, CP 1\. Set all three to 1"),
        ({"use_torch_fsdp2": True}, "cannot be combined with --use-torch-fsdp2: FSDP2 shards"),
        ({"use_megatron_fsdp": True}, "cannot be combined with --use-megatron-fsdp"),
        ({"data_parallel_random_init": True}, "replicas of every module start equal"),
        ({"global_batch_size": 18}, "18 is not a multiple of micro batch 2 x backbone data parallel 2 = 4"),
        ({"hetero_encoder_mbs_scale": 0}, "scale 0 must lie between 1 and the 4 microbatches"),
        ({"hetero_encoder_mbs_scale": 5}, "scale 5 must lie between 1 and the 4 microbatches"),
        ({"micro_batch_size": None}, "--micro-batch-size is missing"),
        ({"micro_batch_size": 3, "global_batch_size": 24}, "audio_encoder.mbs is 4, which is not a multiple"),
        ({"model": [1]}, "must hold a JSON object"),
        (
            {"model": {**MODEL, "image_generator": {"tp": 1}}, "num_virtual_stages_per_pipeline_rank": 2},
            "image_generator follows the 1F1B schedule, but --num-virtual-stages-per-pipeline-rank",
        ),
        (
            {
                "model": {**MODEL, "audio_encoder": {"tp": 2}, "image_generator": {"tp": 1}},
                "global_batch_size": 4,
                "hetero_encoder_mbs_scale": 1,
            },
            "image_generator needs at least as many microbatches as .* has 1 for 2 stages",
        ),
        (
            {"model": {**MODEL, "audio_encoder": {"tp": 4}}, "ckpt_format": "torch", "save": "out"},
            r"audio_encoder has tp 4, which does not divide the backbone's tp 2: .* Use --ckpt-format torch_dist",
        ),
        (
            {"model": {**MODEL, "audio_encoder": {"pp": 2}}, "ckpt_format": "torch", "save": "out"},
            "audio_encoder has pp 2: parts would be lost",
        ),
        (
            {"ckpt_format": "torch", "save": "out", "use_distributed_optimizer": True},
            "the distributed optimizer's state lies on all ranks",
        ),
        ({"model": {**MODEL, "audio_encoder": {"tp": 2, "hetero": {"adapter": "none_such:X"}}}}, "cannot be loaded"),
        ({"model": {**MODEL, "audio_encoder": {"tp": 2, "hetero": {"adapter": 7}}}}, r"hetero\.adapter is 7"),
        (
            {"model": {**MODEL, "audio_encoder": {"tp": 2, "hetero": {"attr": "audio encoder"}}}},
            r"attr is audio encoder",
        ),
        (
            {
                "model": {
                    **MODEL,
                    "image_encoder": {
                        "tp": 2,
                        "hetero": {
                            "attr": "vision_tower",
                            "adapter": "mindspeed_autoparallel.runtime.hetero.adapters.llava:LlavaVision",
                        },
                    },
                }
            },
            r"image_encoder: the model has no attribute 'vision_tower' .* \(it has vision_model\)",
        ),
        ({"model": {"text_decoder": {"tp": 1}}}, "no block besides 'text_decoder'"),
        ({"model": {**MODEL, "text_decoder": {"num_layers": 1}}}, "exactly one backbone, found none"),
        ({"model": {**MODEL, "text_decoder": {"tp": 3}}}, "8 ranks are not a multiple of tp 3"),
    ],
)
def test_impossible_sizes_are_refused_with_their_numbers(job, tmp_path, changes, message):
    model = changes.pop("model", MODEL)
    with pytest.raises(ConfigError, match=message):
        entry.prepare(arguments(tmp_path, model, **changes))
    assert job.layout is None


def test_an_incomplete_last_window_of_the_scale_is_allowed(job, tmp_path):
    entry.prepare(arguments(tmp_path, hetero_encoder_mbs_scale=3, global_batch_size=16))
    assert job.scales["image_encoder"] == 3


def test_a_script_without_a_model_flag_names_the_file_with_ours(job, tmp_path):
    given = arguments(tmp_path)
    given.hetero_model = given.mm_model
    del given.mm_model
    entry.prepare(given)
    assert set(job.own_pipelines) == {"image_encoder", "audio_encoder"}


@pytest.mark.parametrize("flag", ["mm_model", "hetero_model"])
def test_a_missing_file_is_reported_with_the_flag_that_names_it(job, tmp_path, flag):
    """On Megatron's own scripts the message named --mm-model, which they do not have."""
    with pytest.raises(ConfigError, match=rf"\(--{flag.replace('_', '-')}\) none.json"):
        entry.prepare(arguments(tmp_path, **{"mm_model": None, flag: "none.json"}))


def test_modules_that_reduce_their_gradients_after_the_last_backward_are_listed(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    entry.prepare(arguments(tmp_path, overlap_grad_reduce=True))
    assert "--overlap-grad-reduce" not in capsys.readouterr().out
    model = {**MODEL, "audio_encoder": {"tp": 2, "pp": 2}, "image_generator": {"tp": 1}}
    entry.prepare(arguments(tmp_path, model=model, overlap_grad_reduce=True))
    assert "--overlap-grad-reduce does not reach audio_encoder, image_generator" in capsys.readouterr().out
