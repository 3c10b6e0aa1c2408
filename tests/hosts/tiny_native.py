"""Write a four-layer model of MindSpeed-MM's native trainer with random weights, a tokenizer of bytes, and talks.

python tiny_native.py FOLDER KIND       needs transformers 4.57 (moe, dense), 5.0 (omni) or 5.2 (linear, linear-moe, mimo, asr)

``moe`` is Qwen3-VL with experts, ``dense`` the one without, ``omni`` the thinker of Qwen3-Omni, ``linear`` and ``linear-moe`` Qwen3.5, ``mimo``
MiMo-V2.5 without sound and ``asr`` Qwen3-ASR, whose classes are the trainer's own. Data: ``text.json``, ``pictures.json`` with one picture in each
talk, ``sounds.json`` with a picture and half a second, and ``speech.json`` with half a second and its text.
"""

import json
import random
import shutil
import struct
import sys
import wave
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "tie_word_embeddings": False,
}
PLAIN = {key: value for key, value in TEXT.items() if key != "rope_scaling"}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LINEAR = {
    **PLAIN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
MIMO = {
    **PLAIN,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "partial_rotary_factor": 0.5,
    "v_head_dim": 8,
    "sliding_window": 16,
    "add_swa_attention_sink_bias": True,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [False, True, True, True],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
"""Full and sliding attention, a sink in the latter, values of another width than keys; one dense layer, then experts."""
AUDIO = {
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}
SPEECH = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'user' %}<|audio_start|><|audio_pad|>"
    "<|audio_end|>{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
PATCHES = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}


def write_tokenizer(folder, kind):
    """Write tokenizer and processor; returns the numbers of the special tokens."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = {"vocab_file": str(folder / "vocab.json"), "merges_file": str(folder / "merges.txt")}
    given = files if transformers.__version__.startswith("4.") else {"vocab": vocabulary, "merges": []}
    named = {f"{what}_token": f"<|{what}_pad|>" for what in ("image", "video", "audio")}
    for what in ("vision", "audio"):
        named |= {f"{what}_bos_token": f"<|{what}_start|>", f"{what}_eos_token": f"<|{what}_end|>"}
    given |= {"extra_special_tokens": named} if kind in ("omni", "asr") else {}
    tokenizer = transformers.Qwen2TokenizerFast(**given)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    pictures = transformers.Qwen2VLImageProcessor(min_pixels=4096, max_pixels=4096, **PATCHES)
    parts = {"image_processor": pictures, "tokenizer": tokenizer, "chat_template": "x"}
    if kind == "asr":
        from mindspeed_mm.fsdp.models.qwen3_asr import Qwen3ASRProcessor

        sounds = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=2)
        processor = Qwen3ASRProcessor(sounds, tokenizer, chat_template=SPEECH)
    elif kind == "omni":
        sounds = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=2)
        video = transformers.Qwen2VLVideoProcessor(**PATCHES)
        processor = transformers.Qwen3OmniMoeProcessor(**parts, feature_extractor=sounds, video_processor=video)
    else:
        video = transformers.Qwen3VLVideoProcessor(**PATCHES)
        processor = transformers.Qwen3VLProcessor(**parts, video_processor=video)
    processor.save_pretrained(folder)
    return {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}


def write_mimo(folder, numbers):
    """Write the trainer's own code of MiMo's configuration; return the class of its model, and the configuration."""
    from mindspeed_mm.fsdp.models.mimov2_5 import configuration_mimo_v2, modeling_mimo_v2

    vision = {key: value for key, value in VISION.items() if key != "deepstack_visual_indexes"}
    vision |= {"hidden_act": "silu", "qk_channels": 16, "num_key_value_heads": 1, "use_sink": True}
    vision |= {"visual_token_window_size": 4, "fullatt_block_indexes": [1], "vit_window_attn_types": [1, -1]}
    tokens = {"image_token_id": numbers["<|image_pad|>"], "video_token_id": numbers["<|video_pad|>"]}
    config = configuration_mimo_v2.MiMoV2Config(**MIMO, **tokens, vision_config=vision)
    config.auto_map = {"AutoConfig": "configuration_mimo_v2.MiMoV2Config"}
    shutil.copy(configuration_mimo_v2.__file__, folder)
    return modeling_mimo_v2.MiMoV2ForCausalLM, config


def make_asr(numbers):
    """Return the trainer's own class of Qwen3-ASR, and the configuration."""
    from mindspeed_mm.fsdp.models import qwen3_asr

    parts = {
        "text_config": TEXT | {"pad_token_id": 0},
        "audio_config": AUDIO,
        "audio_token_id": numbers["<|audio_pad|>"],
    }
    thinker = parts | {"audio_start_token_id": numbers["<|audio_start|>"]}
    return qwen3_asr.Qwen3ASRForConditionalGeneration, qwen3_asr.Qwen3ASRConfig(thinker_config=thinker)


def write_model(folder, kind):
    """Write a model with weights of a fixed seed."""
    numbers = write_tokenizer(folder, kind)
    tokens = {
        "image_token_id": numbers["<|image_pad|>"],
        "video_token_id": numbers["<|video_pad|>"],
        "vision_start_token_id": numbers["<|vision_start|>"],
        "vision_end_token_id": numbers["<|vision_end|>"],
    }
    vision = (
        VISION if kind in ("moe", "dense") else {k: v for k, v in VISION.items() if k != "deepstack_visual_indexes"}
    )
    names = {
        "moe": "Qwen3VLMoe",
        "dense": "Qwen3VL",
        "omni": "Qwen3OmniMoe",
        "linear": "Qwen3_5",
        "linear-moe": "Qwen3_5Moe",
        "mimo": "MiMoV2",
        "asr": "Qwen3ASR",
    }
    if kind == "omni":
        # transformers 5.0.0 reads the attribute before it sets it, as native_stand_ins/sitecustomize.py says.
        transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorConfig.use_sliding_window = False
        config = transformers.Qwen3OmniMoeConfig(
            thinker_config={
                "pad_token_id": 0,
                "text_config": TEXT | EXPERTS,
                "vision_config": VISION,
                "audio_config": AUDIO,
                "image_token_id": numbers["<|image_pad|>"],
                "video_token_id": numbers["<|video_pad|>"],
                "audio_token_id": numbers["<|audio_pad|>"],
                "audio_start_token_id": numbers["<|audio_start|>"],
                "vision_start_token_id": numbers["<|vision_start|>"],
            }
        )
        module, inner = transformers.Qwen3OmniMoeThinkerForConditionalGeneration, config.thinker_config
    elif kind == "mimo":
        module, inner = write_mimo(folder, numbers)
        config = inner
    elif kind == "asr":
        module, inner = make_asr(numbers)
        config = inner
    else:
        text = {"moe": TEXT | EXPERTS, "dense": TEXT, "linear": LINEAR, "linear-moe": LINEAR | EXPERTS}[kind]
        text = text | ({"shared_expert_intermediate_size": 64} if kind == "linear-moe" else {})
        inner = config = getattr(transformers, f"{names[kind]}Config")(
            text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens
        )
        module = getattr(transformers, f"{names[kind]}ForConditionalGeneration")
    torch.manual_seed(7)
    model = module(inner).float()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith(("correction_bias", "sink_bias")):  # the latter start empty
            torch.nn.init.normal_(parameter, std=0.05)
    config.architectures = [f"{names[kind]}ForConditionalGeneration"]
    config.save_pretrained(folder)  # of the whole model, where the host trains its thinker alone
    save_file(dict(host_weights(model, kind)), folder / "model.safetensors", {"format": "pt"})


def host_weights(model, kind):
    """Yield names and tensors as the host reads them: the omni model's experts one by one."""
    for name, value in model.state_dict().items():
        if kind == "omni" and ".mlp.experts." in name:
            place, _, what = name.rpartition(".")
            for number, matrix in enumerate(value):
                parts = matrix.chunk(2) if what == "gate_up_proj" else (matrix,)
                words = ("gate_proj", "up_proj") if what == "gate_up_proj" else ("down_proj",)
                for word, part in zip(words, parts, strict=True):
                    yield f"{place}.{number}.{word}.weight", part.contiguous()
        else:
            yield name, value.contiguous()


def write_data(folder):
    """Write conversations of one length, and the pictures and sounds in them."""
    from PIL import Image

    words = random.Random(0)

    def text(length):
        inside = "".join(words.choice("abcdefgh ") for _ in range(length - 2))
        return f"a{inside}a"  # templates strip spaces

    talks = [
        {"messages": [{"role": "user", "content": text(24)}, {"role": "assistant", "content": text(31)}]}
        for _ in range(32)
    ]
    (folder / "text.json").write_text(json.dumps(talks))
    for number, talk in enumerate(talks):
        picture = folder / f"picture{number % 8}.png"
        Image.frombytes("RGB", (64, 64), random.Random(number % 8).randbytes(3 * 64 * 64)).save(picture)
        talk["images"] = [str(picture)]
        talk["messages"][0]["content"] = "<image>" + talk["messages"][0]["content"]
    (folder / "pictures.json").write_text(json.dumps(talks))
    for number, talk in enumerate(talks):
        sound = folder / f"sound{number % 8}.wav"
        drawn = random.Random(number % 8)
        with wave.open(str(sound), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(b"".join(struct.pack("<h", drawn.randint(-9000, 9000)) for _ in range(8000)))
        talk["audios"] = [str(sound)]
        talk["messages"][0]["content"] = "<audio>" + talk["messages"][0]["content"]
    (folder / "sounds.json").write_text(json.dumps(talks))
    speech = [{"audio": talk["audios"][0], "messages": talk["messages"][1:]} for talk in talks]
    (folder / "speech.json").write_text(json.dumps(speech))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "model").mkdir(parents=True, exist_ok=True)
    write_model(target / "model", sys.argv[2])
    write_data(target)
