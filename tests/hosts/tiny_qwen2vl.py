"""A tiny Qwen2-VL or Qwen2.5-VL with real data for MindSpeed-MM: tokenizer, processor, pictures, its two JSON files.

Everything is fp32, so that losses can be compared; the host says it takes bf16 alone, and the one line that does not run
in fp32 is changed in the copy of its script.
"""

import json
from pathlib import Path
from typing import Any

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>"),
    "<|video_pad|>",
]
PATCH = 28
"""Pixels of a merged patch: pictures are 2 x 2 of them."""
NUM_PICTURES = 32
MODELS = {"qwen2vl": ("2b", "Qwen2VLProcessor"), "qwen2.5vl": ("3b", "Qwen2_5_VLProcessor")}
"""By folder of the host's examples: the smallest model there, and transformers' processor."""


def write(
    folder: Path, sources: Path, model_name: str = "qwen2vl", vision_layers: int = 4, text_layers: int = 4
) -> None:
    """Write script, data.json and model.json below ``folder``, with our import in front of the script's lines."""
    huggingface, data = folder / "hf", folder / "data"
    huggingface.mkdir(parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    size, processor = MODELS[model_name]
    ids = _tokenizer(huggingface, processor)
    (huggingface / "config.json").write_text(json.dumps(_config(model_name, vision_layers, text_layers)))
    rows = _pictures(data)
    (data / "data.json").write_text(json.dumps(rows))
    script = (sources / "pretrain_vlm.py").read_text().replace("model.module.module", "model.module")
    (folder / "pretrain_vlm.py").write_text("import mindspeed_autoparallel  # before megatron\n" + script)
    example = sources / "examples" / model_name
    model = _model(json.loads((example / f"model_{size}.json").read_text()), ids, vision_layers, text_layers)
    (folder / "model.json").write_text(json.dumps(model, indent=1))
    content = json.loads((example / f"data_{size}.json").read_text())
    content["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(huggingface)
    content["dataset_param"]["basic_parameters"].update(
        dataset_dir=str(data),
        dataset=str(data / "data.json"),
        cache_dir=str(folder / "cache"),
        preprocessing_num_workers=1,
    )
    (folder / "data.json").write_text(json.dumps(content))


def _tokenizer(folder: Path, processor: str) -> dict[str, int]:
    """Write a tokenizer of single bytes and the special tokens, and an image processor; return the special ids."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2TokenizerFast, Qwen2VLImageProcessor

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    (folder / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(alphabet)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2TokenizerFast(vocab_file=str(folder / "vocab.json"), merges_file=str(folder / "merges.txt"))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    pixels = (2 * PATCH) ** 2
    Qwen2VLImageProcessor(min_pixels=pixels, max_pixels=pixels).save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": processor}))
    return {word: int(tokenizer.convert_tokens_to_ids(word)) for word in SPECIAL}


def _pictures(folder: Path) -> list[dict[str, Any]]:
    import numpy as np
    from PIL import Image

    rows = []
    for number in range(NUM_PICTURES):
        pixels = np.random.default_rng(number).integers(0, 255, (2 * PATCH, 2 * PATCH, 3), dtype=np.uint8)
        file = folder / f"{number}.png"
        Image.fromarray(pixels).save(file)
        question = {"role": "user", "content": "<image>what"}
        answer = {"role": "assistant", "content": f"answer number {number:02d}"}
        rows.append({"id": number, "images": [str(file)], "messages": [question, answer]})
    return rows


def _config(model_name: str, vision_layers: int, text_layers: int) -> dict[str, Any]:
    """Return what transformers and our ``convert`` read of the same model."""
    vision = {"depth": vision_layers, "num_heads": 4, "hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2}
    if model_name == "qwen2vl":
        vision |= {"embed_dim": 64, "mlp_ratio": 2, "in_channels": 3}
    else:
        vision |= {"intermediate_size": 128, "out_hidden_size": 64, "in_chans": 3}
    return {
        "model_type": "qwen2_vl" if model_name == "qwen2vl" else "qwen2_5_vl",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": text_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "vision_config": vision,
    }


def _model(model: dict[str, Any], ids: dict[str, int], vision_layers: int, text_layers: int) -> Any:
    model.update(img_context_token_id=ids["<|image_pad|>"], vision_start_token_id=ids["<|vision_start|>"])
    if "video_token_id" in model:
        model["video_token_id"] = ids["<|video_pad|>"]
    common = {"hidden_size": 64, "bf16": False, "params_dtype": "fp32", "freeze": False}
    vision = model["image_encoder"]["vision_encoder"]
    vision.update(
        common,
        num_layers=vision_layers,
        pipeline_num_layers=[vision_layers],
        ffn_hidden_size=128,
        llm_hidden_size=64,
        num_attention_heads=4,
    )
    if "intermediate_size" in vision:
        vision.update(intermediate_size=128, fullatt_block_indexes=[1, vision_layers - 1])
    model["image_encoder"]["vision_projector"].update(common, input_size=64, ffn_hidden_size=256)
    model["text_decoder"].update(
        common,
        # Asserted by the decoder for its rotary embedding, and read nowhere else.
        bf16=True,
        num_layers=text_layers,
        pipeline_num_layers=[text_layers],
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=512,
        mrope_section=[2, 3, 3],
        max_position_embeddings=1024,
    )
    return model
