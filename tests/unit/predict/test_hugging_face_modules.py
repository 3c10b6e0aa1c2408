"""Vision-language and omni configurations: sizes as published, layers as large as transformers builds them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hugging_face_configs import QWEN3_30B_A3B

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.hugging_face import decoder_of_config
from mindspeed_autoparallel.predict.hugging_face_modules import SampleMedia, modules_of_config
from mindspeed_autoparallel.predict.predict import predict_one

QWEN25_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "spatial_merge_size": 2,
    "out_hidden_size": 3584,
}
QWEN25_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN25_VL = {"model_type": "qwen2_5_vl", **QWEN25_TEXT, "vision_config": QWEN25_VISION}
QWEN3_VL = {
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": {**QWEN3_30B_A3B, "model_type": "qwen3_vl_moe_text"},
    "vision_config": {
        "model_type": "qwen3_vl_moe",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "deepstack_visual_indexes": [8, 16, 24],
        "out_hidden_size": 2048,
    },
}
INTERNVL = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "llm_config": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 151674,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "intern_vit_6b",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": 448,
        "patch_size": 14,
    },
}
OMNI = {
    "model_type": "qwen2_5_omni",
    "talker_config": {},
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {"model_type": "qwen2_5_omni_text", **QWEN25_TEXT},
        "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", **QWEN25_VISION},
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
        },
    },
}
GLM = {
    "model_type": "glm4v_moe",
    "text_config": {
        "model_type": "glm4v_moe_text",
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 151552,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "glm4v_moe_vision",
        "depth": 24,
        "hidden_size": 1536,
        "num_heads": 12,
        "patch_size": 14,
        "intermediate_size": 10944,
        "out_hidden_size": 4096,
    },
}
CONFIGS = {"qwen2.5-vl": QWEN25_VL, "qwen3-vl": QWEN3_VL, "internvl": INTERNVL, "omni": OMNI, "glm-4.5v": GLM}


def _layers(module: dict[str, Any]) -> list[float]:
    """Return parameters of every layer."""
    model = {key: value for key, value in module.items() if key not in ("name", "frozen", "deepstack_visual_indexes")}
    hardware = {"gpu": "H100", "num_gpus": 1, "gpus_per_node": 8}
    work = read_workload(
        {"model": {"seq": 4096, **model}, "hw": hardware, "parallel": {}, "train": {"gbs": 1, "mbs": 1}}
    )
    counted = [layer_parameters(work, kind) for kind in work.model.layers]
    return [layer.shared + layer.expert for layer in counted]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-vl", 7.62), ("qwen3-vl", 30.5), ("internvl", 7.61), ("omni", 7.62), ("glm-4.5v", 106.0)],
)
def test_decoders_have_the_sizes_of_their_model_cards(name: str, billions: float) -> None:
    """Qwen2.5-7B 7.61, Qwen3-30B-A3B 30.5, GLM-4.5-Air 106 billion parameters."""
    decoder = modules_of_config(CONFIGS[name], name, SampleMedia())[-1]
    total = sum(_layers(decoder)) + 2 * decoder["vocab"] * decoder["hidden"]
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


def test_patches_frames_and_windows_follow_from_the_sample() -> None:
    media = SampleMedia(images=2, image_size=(448, 896), audio_s=12.0, frozen_encoders=True)
    image, audio, text = modules_of_config(OMNI, "omni", media)
    assert (image["seq"], image["window"], image["windowed_share"]) == (2 * 32 * 64, 64, 28 / 32)
    assert audio["seq"] == 600 and image["frozen"] and audio["frozen"] and "frozen" not in text
    image, _ = modules_of_config(INTERNVL, "internvl", media)
    assert (image["seq"], image["window"]) == (4096, 2048)
    image, _ = modules_of_config(QWEN3_VL, "qwen3", SampleMedia(patches=1000))
    assert image["seq"] == 1000 and image["deepstack_visual_indexes"] == [8, 16, 24] and "window" not in image


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "internvl", "glm-4.5v"])
def test_encoder_layers_are_as_large_as_those_that_transformers_builds(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = copy.deepcopy(CONFIGS[name])
    image = modules_of_config(config, name, SampleMedia())[0]
    vision = {**config["vision_config"], "depth": 1, "num_hidden_layers": 1, "fullatt_block_indexes": [0]}
    vision.pop("model_type", None)
    vision["deepstack_visual_indexes"] = []
    kinds = {
        "qwen2.5-vl": ("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel", "blocks"),
        "qwen3-vl": ("qwen3_vl_moe", "Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel", "blocks"),
        "internvl": ("internvl", "InternVLVisionConfig", "InternVLVisionModel", "encoder.layer"),
        "glm-4.5v": ("glm4v_moe", "Glm4vMoeVisionConfig", "Glm4vMoeVisionModel", "blocks"),
    }
    folder, configuration, model, blocks = kinds[name]
    made = getattr(transformers, configuration, None)
    if made is None:
        made = getattr(__import__(f"transformers.models.{folder}", fromlist=[configuration]), configuration)
    kind = getattr(__import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[model]), model)
    with torch.device("meta"):
        tower = kind(made(**vision))
    (block,) = tower.get_submodule(blocks)
    assert _layers(image)[-1] == pytest.approx(sum(weight.numel() for weight in block.parameters()), rel=0.01)


@pytest.mark.parametrize("experts", [False, True])
def test_qwen3_5_layers_are_as_large_as_those_that_transformers_builds(experts: bool) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2}
    sizes |= {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 1024}
    widths = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    widths |= {"shared_expert_intermediate_size": 512}
    sizes |= widths if experts else {"intermediate_size": 6144}
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}TextConfig")(**sizes))
    theirs = [sum(weight.numel() for weight in layer.parameters()) for layer in model.model.layers]
    ours = _layers(decoder_of_config({"model_type": f"qwen3_5_{'moe_' * experts}text", **sizes}, "config"))
    pairs = [mixer + mlp for mixer, mlp in zip(ours[::2], ours[1::2], strict=True)]
    assert pairs == pytest.approx(theirs, rel=0.01)


def test_kimi_linear_layers_are_as_large_as_those_that_transformers_builds() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "vocab_size": 163840,
    }
    sizes |= {"num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    sizes |= {"v_head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 512, "first_k_dense_replace": 1}
    sizes |= {"num_experts": 16, "num_experts_per_token": 2, "num_shared_experts": 1}
    linear = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 128, "num_heads": 16}
    sizes["linear_attn_config"] = {**linear, "short_conv_kernel_size": 4}
    with torch.device("meta"):
        model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**sizes))
    theirs = [sum(weight.numel() for weight in layer.parameters()) for layer in model.model.layers]
    ours = _layers(decoder_of_config({"model_type": "kimi_linear", **sizes}, "config"))
    pairs = [mixer + mlp for mixer, mlp in zip(ours[::2], ours[1::2], strict=True)]
    assert pairs == pytest.approx(theirs, rel=0.002)


KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "attn_res_block_size": 12,
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [number for number in range(1, 93) if number % 4],
            "head_dim": 128,
            "num_heads": 96,
            "use_full_rank_gate": True,
        },
        "mla_use_output_gate": True,
        "moe_intermediate_size": 3072,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "routed_expert_hidden_size": 3584,
        "vocab_size": 163840,
    },
    "vision_config": {
        "qkv_hidden_size": 1536,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": 27,
    },
}
"""moonshotai/Kimi-K3, as published in July 2026."""


def test_kimi_k3_is_as_large_as_its_published_files() -> None:
    """Its 96 files hold 1,503,647,073,024 elements, of experts four bits each and a scale byte of 32 of them."""
    image, text = modules_of_config(KIMI_K3, "kimi", SampleMedia(patches=1024))
    model = {key: value for key, value in text.items() if key != "name"}
    hardware = {"gpu": "H100", "num_gpus": 1, "gpus_per_node": 8}
    request = {"model": {"seq": 4096, **model}, "hw": hardware, "parallel": {}, "train": {"gbs": 1, "mbs": 1}}
    work = read_workload(request)
    counted = [layer_parameters(work, kind) for kind in work.model.layers]
    stored = sum(one.shared + one.expert * (1 / 2 + 1 / 32) for one in counted)
    stored += 2 * 163840 * 7168 + sum(_layers(image))
    assert stored == pytest.approx(1_503_647_073_024, rel=2e-4)


def test_nemotron_h_layers_are_as_large_as_those_that_transformers_builds() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kinds = ["mamba", "mlp", "mamba", "attention", "moe", "mamba"]
    sizes: dict[str, Any] = {"hidden_size": 2048, "layers_block_type": kinds, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 4096, "vocab_size": 1024}
    sizes |= {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
    sizes |= {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "moe_latent_size": 512}
    sizes |= {"moe_shared_expert_intermediate_size": 1024}
    with torch.device("meta"):
        model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**sizes))
    theirs = [sum(weight.numel() for weight in layer.parameters()) for layer in model.model.layers]
    listed = decoder_of_config({"model_type": "nemotron_h", **sizes}, "config")
    assert _layers(listed) == pytest.approx(theirs, rel=0.002)
    written = {key: value for key, value in sizes.items() if key != "layers_block_type"}
    assert listed == decoder_of_config(
        {"model_type": "nemotron_h", **written, "hybrid_override_pattern": "M-M*EM"}, "c"
    )


def test_plan_takes_an_omni_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = copy.deepcopy(OMNI)
    small["thinker_config"]["text_config"]["num_hidden_layers"] = 4  # type: ignore[index]
    small["thinker_config"]["vision_config"]["depth"] = 4  # type: ignore[index]
    small["thinker_config"]["audio_config"]["encoder_layers"] = 4  # type: ignore[index]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small))
    words = ["plan", "--profile-source", "analytic", "--model", str(file), "--seq-length", "2048", "--device", "910B"]
    words += ["--nnodes", "1", "--nproc-per-node", "2", "--global-batch-size", "8", "--time-limit-s", "5", "--json"]
    assert main([*words, "--num-workers", "1", "--images-per-sample", "2", "--audio-seconds", "10"]) == 0
    plan = json.loads(capsys.readouterr().out)
    tokens = {module["name"]: module["tokens_per_sample"] for module in plan["model"]["modules"]}
    assert tokens == {"image_encoder": 2048, "audio_encoder": 500, "text_decoder": 2048}


def test_predict_takes_a_vision_language_config_and_refuses_two_encoders() -> None:
    hardware = {"gpu": "H100", "num_gpus": 8, "gpus_per_node": 8}
    run = {"hw": hardware, "parallel": {"tp": 4}, "train": {"gbs": 8, "mbs": 1}}
    few = predict_one({"model": {**QWEN25_VL, "seq": 4096, "images": 1}, **run})
    many = predict_one({"model": {**QWEN25_VL, "seq": 4096, "images": 8}, **run})
    assert few["status"] == "ok" and many["step_time_ms"] > few["step_time_ms"]
    assert "2 encoders" in predict_one({"model": {**OMNI, "seq": 4096}, **run})["reason"]


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ConfigError, match="encoder siglip"):
        modules_of_config({**QWEN25_VL, "vision_config": {"model_type": "siglip"}}, "config", SampleMedia())
    with pytest.raises(ConfigError, match="text decoder mine"):
        modules_of_config({"model_type": "mine", "text_config": {}, "vision_config": {}}, "config", SampleMedia())
