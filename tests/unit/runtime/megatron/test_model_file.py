"""model.json as MindSpeed-MM's examples write it: every kind of file is described rightly, or refused with the reason."""

from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron.description import modules_of_file

FILE = Path("model.json")
VISION = {
    "vision_encoder": {"model_id": "vit", "num_layers": 24, "hidden_size": 64, "freeze": True},
    "vision_projector": {"num_layers": 1},
}
TEXT = {"model_id": "lm", "num_layers": 28, "hidden_size": 128}


def modules(content):
    return [(module.name, module.num_layers, module.frozen) for module in modules_of_file(content, FILE)]


def test_the_text_decoder_is_last_regardless_of_its_place_in_the_file():
    """InternVL, DeepSeek-VL2 and Qwen3-VL list it first, but it is not an encoder."""
    found = modules({"model_id": "InternVL3", "text_decoder": TEXT, "image_encoder": VISION})
    assert found == [("image_encoder", 24, True), ("text_decoder", 28, False)]


def test_layers_that_give_features_to_the_decoder_are_counted():
    vision = {"vision_encoder": {**VISION["vision_encoder"], "deepstack_visual_indexes": [8, 16, 24]}}
    found = modules_of_file({"image_encoder": vision, "text_decoder": TEXT}, FILE)
    assert [module.deepstack_layers for module in found] == [3, 0]
    vision["vision_encoder"]["deepstack_visual_indexes"] = 3
    with pytest.raises(ConfigError, match="deepstack_visual_indexes must be a list of layers, got 3"):
        modules_of_file({"image_encoder": vision, "text_decoder": TEXT}, FILE)


def test_encoders_keep_the_files_order_and_empty_ones_are_none():
    audio = {"audio_encoder": {"num_layers": 32}}
    found = modules({"image_encoder": VISION, "audio_encoder": audio, "video_encoder": None, "text_decoder": TEXT})
    assert [name for name, _, _ in found] == ["image_encoder", "audio_encoder", "text_decoder"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            {"predictor": {"num_layers": 42}, "diffusion": {"model_id": "cogvideo"}, "ae": {}, "text_encoder": []},
            r"describes a diffusion model \(blocks: predictor, diffusion, ae, text_encoder\)",
        ),
        ({"ae": {"model_id": "vae"}}, r"describes another kind of model \(blocks: ae\).*has no text_decoder"),
        ({"mllm": {}, "image_encoder": VISION}, "another kind of model"),
        (
            {"init_from_hf_path": "ckpt/InternVL3_5", "text_decoder": {"num_layers": 999}},
            r"built by transformers from ckpt/InternVL3_5 \(init_from_hf_path\): its num_layers are placeholders",
        ),
        ({"text_decoder": {"hidden_size": 64}, "image_encoder": VISION}, "text_decoder has no num_layers"),
        ({"text_decoder": {"num_layers": 0}}, "text_decoder.num_layers must be a positive integer, got 0"),
        ({"text_decoder": {**TEXT, "hidden_size": "64"}}, "text_decoder.hidden_size must be a positive integer"),
    ],
)
def test_other_files_are_refused_with_the_reason(content, reason):
    with pytest.raises(ConfigError, match=reason):
        modules_of_file(content, FILE)
