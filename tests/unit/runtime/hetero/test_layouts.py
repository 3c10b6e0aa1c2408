"""model.json's module sizes: what is read, and every refusal with its numbers."""

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.layouts import (
    ModuleLayout,
    check_batch,
    check_scale,
    check_script_sizes,
    encoder_scale,
    read_layout,
)

GOOD = {
    "image_encoder": {"vision_encoder": {"num_layers": 2, "tp": 1, "pp": 1, "cp": 1}},
    "audio_encoder": {"tp": 2, "cp": 1, "mbs": 4, "hetero": {"attr": "model.audio"}},
    "text_decoder": {"tp": 2, "pp": 2, "cp": 1},
}


def test_a_top_level_block_with_sizes_in_it_is_a_module_and_its_name_its_attribute():
    layout = read_layout(GOOD, world_size=8)
    assert layout.backbone.name == "text_decoder"
    assert [(e.name, e.attribute, e.tensor_size, e.micro_batch_size) for e in layout.encoders] == [
        ("image_encoder", "image_encoder", 1, None),
        ("audio_encoder", "model.audio", 2, 4),
    ]
    assert layout.backbone.data_parallel_size(8) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_decoder": {"num_layers": 2}}, "exactly one backbone, found none"),
        ({"other": {"tp": 1, "hetero": {"role": "backbone"}}}, "found text_decoder, other"),
        ({"audio_encoder": {"tp": 3}}, "8 ranks are not a multiple of tp 3"),
        ({"audio_encoder": {"pp": 2, "num_layers": 1}}, "1 layers do not give each of pp 2 stages one"),
        ({"audio_encoder": {"tp": 4, "num_attention_heads": 6}}, "6 attention heads cannot be divided by tp 4"),
        ({"audio_encoder": {"cp": 4, "num_attention_heads": 6}}, "6 attention heads cannot be divided by cp 4"),
        ({"text_decoder": {"tp": 8, "num_attention_heads": 4}}, "text_decoder: 4 attention heads cannot be divided"),
        (
            {"audio_encoder": {"tp": 4, "audio_encoder": {"num_attention_heads": 6}}},
            "6 attention heads cannot be divided by tp 4",
        ),
        (
            {"image_encoder": {"vision_encoder": {"tp": 2}, "vision_projector": {"tp": 1}}},
            "image_encoder trains under one layout, but image_encoder.vision_encoder, image_encoder.vision_projector",
        ),
        ({"audio_encoder": {"tp": "2"}}, "audio_encoder.tp is '2'"),
        ({"audio_encoder": {"tp": 2, "sp": 1}}, r"audio_encoder\.sp is 1; it must be true or false"),
        ({"audio_encoder": {"sp": True, "cp": 1}}, r"audio_encoder\.sp splits rows over tensor ranks, but tp is 1"),
        ({"text_decoder": {"tp": 2, "sp": True}}, r"backbone's sequence parallelism is --sequence-parallel"),
        ({"audio_encoder": {"tp": 2, "dp": 3}}, r"audio_encoder\.dp is 3, but 8 ranks / \(tp x pp x cp = 2\) = 4"),
        ({"text_decoder": {"tp": 2, "pp": 2, "dp": 4}}, r"text_decoder\.dp is 4, but 8 ranks / .* = 2"),
        (
            {"audio_encoder": {"tp": 2, "ranks": [0, 1]}},
            r"audio_encoder\.ranks is \[0, 1\], but every module .* 8 ranks",
        ),
        ({"audio_encoder": {"tp": 2, "ranks": 4}}, r"audio_encoder\.ranks is 4, but"),
        ({"audio_encoder": {"tp": 2, "ep": 2}}, r"audio_encoder\.ep is 2, but .* --expert-model-parallel-size"),
        ({"audio_encoder": {"pp": 2, "pipeline_num_layers": [0, 4]}}, r"is \[0, 4\], but every stage of a module"),
        (
            {"audio_encoder": {"pp": 2, "audio_encoder": {"pipeline_num_layers": [4, 0]}}},
            r"is \[4, 0\], but every stage of a module",
        ),
        ({"audio_encoder": {"tp": 0}}, "whole number from 1 up"),
        ({"audio_encoder": {"tp": 1, "hetero": {"path": "x"}}}, r"unknown keys \['path'\]"),
        ({"audio_encoder": {"tp": 1, "hetero": {"role": "decoder"}}}, "must be one of backbone, encoder, generator"),
        ({"image_generator": {"tp": 2, "pp": 3}}, "8 ranks are not a multiple of tp 2 x pp 3"),
        (
            {"image_generator": {"pp": 2, "pipeline_num_layers": [0, 4]}},
            r"image_generator.pipeline_num_layers is \[0, 4\]",
        ),
        ({"image_generator": {"tp": 1, "cp": 2}}, r"image_generator\.cp is 2, .* Use tp and pp"),
        ({"image_generator": {"tp": 2, "sp": True}}, r"image_generator\.sp is true"),
        ({"image_generator": {"tp": 2, "mbs": 2}}, r"mbs is 2, but a generator takes the backbone's microbatches one"),
        ({"a_generator": {"tp": 1}, "b_generator": {"tp": 1}}, "a_generator, b_generator follow text_decoder"),
        (
            {"image_generator": {"tp": 1}, "text_decoder": {"pp": 2, "pipeline_num_layers": [[1, 1], [1, 1]]}},
            "image_generator follows the 1F1B schedule, but .* 2 virtual stages",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_numbers(change, message):
    with pytest.raises(ConfigError, match=message):
        read_layout({**GOOD, **change}, world_size=8)


def test_a_block_may_repeat_what_follows_from_the_job():
    repeated = {"tp": 2, "dp": 4, "ranks": 8, "ep": 1, "pipeline_num_layers": [2]}
    assert read_layout({**GOOD, "audio_encoder": repeated}, world_size=8).encoders[1].tensor_size == 2
    assert read_layout({**GOOD, "audio_encoder": {"tp": 1, "ranks": list(range(8))}}, world_size=8)


def test_a_block_named_generator_or_called_one_lies_behind_the_backbone():
    layout = read_layout({**GOOD, "image_generator": {"tp": 4}}, world_size=8)
    assert [(module.name, module.role, module.tensor_size) for module in layout.generators] == [
        ("image_generator", "generator", 4)
    ]
    assert [module.name for module in layout.others] == ["image_encoder", "audio_encoder", "image_generator"]
    named = read_layout({**GOOD, "vocoder": {"tp": 2, "hetero": {"role": "generator"}}}, world_size=8)
    assert [module.name for module in named.generators] == ["vocoder"]


def test_a_job_without_encoders_is_refused():
    with pytest.raises(ConfigError, match="no block besides 'text_decoder'"):
        read_layout({"text_decoder": {"tp": 1}}, world_size=8)


def test_the_script_must_leave_sizes_to_the_model_file():
    check_script_sizes(1, 1, 1)
    with pytest.raises(ConfigError, match=r"TP 2, PP 1, CP 1\. Set all three to 1"):
        check_script_sizes(2, 1, 1)


def test_the_batch_is_never_rewritten():
    assert check_batch(32, 2, 4) == 4
    with pytest.raises(ConfigError, match="30 is not a multiple of micro batch 2 x backbone data parallel 4"):
        check_batch(30, 2, 4)


@pytest.mark.parametrize("scale", [0, 9])
def test_the_encoder_scale_lies_within_the_step(scale):
    check_scale(8, 8)
    with pytest.raises(ConfigError, match="between 1 and the 8 microbatches"):
        check_scale(scale, 8)


def test_a_modules_own_micro_batch_comes_before_the_flag():
    assert encoder_scale(ModuleLayout("a", "a", 1, 1, 1), 2, 3) == 3
    assert encoder_scale(ModuleLayout("a", "a", 1, 1, 1, micro_batch_size=8), 2, 3) == 4
    with pytest.raises(ConfigError, match=r"a\.mbs is 5, which is not a multiple of the backbone's micro batch 2"):
        encoder_scale(ModuleLayout("a", "a", 1, 1, 1, micro_batch_size=5), 2, 3)
