"""The user's description: modules, layers, and a hash that depends on the model and not on its layout."""

import argparse
import json

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron.description import describe

MODEL = {
    "model_id": "qwen2vl",
    "image_encoder": {
        "vision_encoder": {"num_layers": 32, "pipeline_num_layers": [32, 0], "num_attention_heads": 16, "freeze": True},
        "vision_projector": {"num_layers": 1},
    },
    "text_decoder": {"num_layers": 80, "pipeline_num_layers": [30, 50], "num_attention_heads": 64},
}


def arguments(path, **changes):
    values = {"mm_model": str(path), "num_layers": 80, "hidden_size": 8192, "seq_length": 128}
    return argparse.Namespace(**{**values, **changes})


@pytest.fixture
def write(tmp_path):
    def write_model(model, name="model.json"):
        path = tmp_path / name
        path.write_text(model if isinstance(model, str) else json.dumps(model))
        return path

    return write_model


def changed(**text):
    return {**MODEL, "text_decoder": {**MODEL["text_decoder"], **text}}


def test_modules_and_layers_come_from_model_json(write):
    described = describe(arguments(write(MODEL)))
    assert [(item.name, item.num_layers, item.frozen) for item in described.modules] == [
        ("image_encoder", 32, True),
        ("text_decoder", 80, False),
    ]


def test_without_model_json_the_flags_describe_a_language_model():
    (module,) = describe(argparse.Namespace(num_layers=12)).modules
    assert (module.name, module.num_layers) == ("text_decoder", 12)


def test_another_layout_of_the_same_model_has_the_same_hash(write):
    first = describe(arguments(write(MODEL)))
    second = describe(arguments(write(changed(pipeline_num_layers=[80], tp=4), "other.json")))
    assert first.model_hash == second.model_hash


@pytest.mark.parametrize("change", [{"num_layers": 79}, {"hidden_size": 4096}, {"num_attention_heads": 32}])
def test_another_model_has_another_hash(write, change):
    first = describe(arguments(write(MODEL)))
    assert first.model_hash != describe(arguments(write(changed(**change), "other.json"))).model_hash


def test_a_smaller_copy_keeps_everything_but_the_layers(write):
    described = describe(arguments(write(MODEL)))
    smaller = described.with_layers({"image_encoder": 2, "text_decoder": 2}, {"text_decoder": [2]})
    assert smaller["text_decoder"] == {"num_layers": 2, "pipeline_num_layers": [2], "num_attention_heads": 64}
    assert smaller["image_encoder"]["vision_encoder"]["num_layers"] == 2
    assert smaller["image_encoder"]["vision_projector"] == {"num_layers": 1}
    assert described.content == MODEL


@pytest.mark.parametrize("layers", [0, -1, 2.5, "80", True])
def test_a_wrong_layer_count_names_file_key_and_range(write, layers):
    with pytest.raises(ConfigError, match=r"model\.json: text_decoder\.num_layers must be a positive integer"):
        describe(arguments(write(changed(num_layers=layers))))


def test_a_missing_file_and_broken_json_are_named(write, tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.json"):
        describe(arguments(tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match="line 1"):
        describe(arguments(write("{broken")))
    with pytest.raises(ConfigError, match="text_decoder has no num_layers"):
        describe(arguments(write({"text_decoder": {}})))


GPT = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 1, "q_lora_rank": None}


@pytest.mark.parametrize(
    "change",
    [
        {"multi_latent_attention": True},
        {"multi_latent_attention": True, "kv_lora_rank": 512},
        {"mtp_num_layers": 1},
        {"num_experts": 8},
        {"num_experts": 8, "moe_layer_freq": [0, 1, 1, 1]},
        {"num_experts": 8, "moe_shared_expert_intermediate_size": 96},
        {"group_query_attention": True, "num_query_groups": 2},
        {"encoder_num_layers": 4},
        {"qk_layernorm": True},
    ],
    ids=str,
)
def test_all_sizes_of_a_language_model_are_in_its_hash(change):
    plain, other = (describe(argparse.Namespace(**{**GPT, **more})) for more in ({}, change))
    assert plain.model_hash != other.model_hash


@pytest.mark.parametrize("change", [{"num_query_groups": 4}, {"kv_lora_rank": 32}, {"moe_layer_freq": 1}], ids=str)
def test_switched_off_arguments_are_not_in_the_hash(change):
    plain, other = (describe(argparse.Namespace(**{**GPT, **more})) for more in ({}, change))
    assert plain.model_hash == other.model_hash


LLAVA = {**GPT, "freeze_ViT": True, "freeze_LM": False}


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ({}, (8, 8)),
        ({"num_layers": None, "encoder_num_layers": 6, "decoder_num_layers": 10}, (6, 10)),
        ({"decoder_num_layers": 10}, (8, 10)),
    ],
)
def test_megatrons_vision_language_script_is_described_by_its_flags(flags, layers):
    vision, language = describe(argparse.Namespace(**{**LLAVA, **flags})).modules
    assert [(vision.name, vision.frozen), (language.name, language.frozen)] == [
        ("vision_model", True),
        ("language_model", False),
    ]
    assert (vision.num_layers, language.num_layers) == layers


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"decoder_num_layers": 12, "encoder_num_layers": 12}, "an encoder and a decoder .*--decoder-num-layers 12"),
        ({"decoder_seq_length": 128}, "an encoder and a decoder .*--decoder-seq-length 128"),
        ({"llm_tp": 2, "encoder_tp": 2}, "a MIMO model"),
        ({"model_provider": "mock", "dataset_provider": "mock"}, "a MIMO model"),
    ],
)
def test_models_that_are_no_single_stack_are_refused_by_name(flags, said):
    with pytest.raises(ConfigError, match=said):
        describe(argparse.Namespace(num_layers=4, **flags))
