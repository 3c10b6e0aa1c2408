"""Turns a Hugging Face ``config.json`` of a vision-language or omni model into the modules of a model file.

Keys are those of the families' configuration classes in transformers, flat or nested, and of OpenGVLab's InternVL.
Projectors between encoder and decoder (a few per mille of the parameters) are left out; so are an omni model's talker
and vocoder, which are trained apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil

from mindspeed_autoparallel.cost.analytic.fields import integer
from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.predict.hugging_face import decoder_of_config, is_decoder

Values = Mapping[str, object]
_NESTED = ("text_config", "llm_config", "thinker_config", "vision_config", "audio_config")
_FRAMES_PER_S = 50
"""Positions of Whisper's encoder, and of those made from it, for a second of audio."""
_AUDIOS = ("qwen2_5_omni", "qwen2_audio", "qwen3_omni_moe_audio", "qwen3_asr_audio", "whisper")
IMAGE, AUDIO, TEXT = "image_encoder", "audio_encoder", "text_decoder"


@dataclass(frozen=True, kw_only=True)
class SampleMedia:
    """Images and audio of a mean sample."""

    images: float = 1.0
    image_size: tuple[int, int] = (448, 448)
    """Height and width in pixels, of an image or of a tile."""
    patches: int = 0
    """Patches of a sample, all images together; 0: from images and their size."""
    audio_s: float = 30.0
    audio_frames: int = 0
    """Encoder positions of a sample; 0: from the seconds."""
    frozen_encoders: bool = False
    stated: tuple[str, ...] = ()
    """Names of the flags that the user set; one for an encoder that the model lacks is an error."""


def is_of_several_modules(config: Values) -> bool:
    """Return whether ``config`` describes encoders beside a decoder."""
    return any(isinstance(config.get(key), Mapping) for key in _NESTED)


def modules_of_config(config: Values, where: str, media: SampleMedia) -> list[dict[str, object]]:
    """Return the modules, encoders first, each as a model file has it; the decoder without ``seq``.

    Raises ``ConfigError`` naming the family or the key.
    """
    inner = config.get("thinker_config")
    values = inner if isinstance(inner, Mapping) else config
    text = _text(values, where)
    modules = []
    if isinstance(vision := values.get("vision_config"), Mapping):
        modules.append({"name": IMAGE, **_vision(vision, values, f"{where}: vision_config", media)})
    if isinstance(audio := values.get("audio_config"), Mapping):
        modules.append({"name": AUDIO, **_audio(audio, f"{where}: audio_config", media)})
    if not modules:
        raise ConfigError(f"{where} has neither vision_config nor audio_config beside its text.")
    names = {module["name"] for module in modules}
    for flag in media.stated:
        encoder = "audio" if flag == "audio_seconds" else "image"
        if f"{encoder}_encoder" not in names and flag != "freeze_encoders":
            raise ConfigError(f"{flag_of(flag)}: {where} has no {encoder} encoder.")
    for module in modules:
        module["frozen"] = media.frozen_encoders
    return [*modules, {"name": TEXT, **text}]


def request_model(config: Values, where: str) -> dict[str, object]:
    """Return the ``model`` of a prediction request, whose images stand beside the configuration's keys: ``images`` per
    sample (1), ``image_size`` (448, or [height, width]), ``patches`` in all, ``frozen_encoders``.

    A request has one encoder: raises ``ConfigError`` for omni models, which ``plan`` takes.
    """
    size = config.get("image_size", 448)
    pair = size if isinstance(size, list) else [size, size]
    whole = {"height": pair[0], "width": pair[-1]}
    media = SampleMedia(
        images=float(integer(config, "images", 1, where)),
        image_size=(integer(whole, "height", None, where), integer(whole, "width", None, where)),
        patches=integer(config, "patches", 0, where, 0),
        frozen_encoders=bool(config.get("frozen_encoders", False)),
    )
    *encoders, decoder = modules_of_config(config, where, media)
    if len(encoders) > 1:
        raise ConfigError(
            f"{where} has {len(encoders)} encoders, and a request one: use plan --profile-source analytic --model FILE."
        )
    (encoder,) = encoders
    sizes = {key: encoder[key] for key in ("num_layers", "hidden", "heads", "ffn", "swiglu", "frozen")}
    sequence = config.get("seq", config.get("seq_length"))
    model = {key: value for key, value in decoder.items() if key != "name"}
    own = {} if sequence is None else {"seq": sequence}
    return {**model, **own, "vision_encoder": {**sizes, "tokens": encoder["seq"]}}


def _text(values: Values, where: str) -> dict[str, object]:
    """Return the decoder's sizes: of the nested configuration, or of flat keys beside it."""
    nested = (values.get(key) for key in ("text_config", "llm_config"))
    config = dict(next((block for block in nested if isinstance(block, Mapping)), values))
    family = str(config.get("model_type") or values.get("model_type") or "")
    config["model_type"] = DECODERS.get(family, family)
    if not is_decoder(config["model_type"]):
        raise ConfigError(
            f"{where}: text decoder {shown(family)} is not known; known: {', '.join(sorted(DECODERS))} and the text "
            "models."
        )
    if config.get("tie_word_embeddings") is None and values.get("tie_word_embeddings") is not None:
        config["tie_word_embeddings"] = values["tie_word_embeddings"]
    for key in _NESTED:
        config.pop(key, None)
    return decoder_of_config(config, where)


DECODERS = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_omni": "qwen2",
    "qwen2_5_omni_thinker": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_omni_moe_thinker": "qwen3_moe",
    "qwen3_asr_text": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "step_robotics": "qwen3",
    "glm4v_moe": "glm4_moe",
    "glm4v_moe_text": "glm4_moe",
}
"""Decoders of these families, and the text model whose layers they have."""


def _vision(vision: Values, whole: Values, where: str, media: SampleMedia) -> dict[str, object]:
    family = str(vision.get("model_type") or whole.get("model_type") or "")
    read = next((rule for prefix, rule in _VISIONS.items() if family.startswith(prefix)), None)
    if read is None:
        raise ConfigError(f"{where}: encoder {shown(family)} is not known; known: {', '.join(_VISIONS)}.")
    sizes = read(vision, where)
    if media.patches and "window_pixels" not in sizes:
        return {"type": "gpt", "causal": False, "vocab": 1, **sizes, "seq": media.patches}
    patch = _side(vision, "patch_size", where)
    height, width = media.image_size
    one = ceil(height / patch) * ceil(width / patch)
    window = integer(sizes, "window_pixels", 0, where, 0) // patch
    sizes.pop("window_pixels", None)
    patches = media.patches or round(media.images * one)
    if window:
        sizes["window"] = min(window * window, patches)
    elif media.images > 1 and not media.patches:
        # Patches attend only to patches of the same image.
        sizes |= {"window": one, "windowed_share": 1.0}
    if "windowed_share" in sizes and not sizes.get("window"):
        del sizes["windowed_share"]
    return {"type": "gpt", "causal": False, "vocab": 1, **sizes, "seq": max(1, patches)}


def _encoder(
    values: Values,
    where: str,
    layers: str = "depth",
    hidden: str = "hidden_size",
    heads: str = "num_heads",
    ffn: str = "intermediate_size",
    swiglu: bool = False,
) -> dict[str, object]:
    """Return the sizes under the keys ``layers``, ``hidden``, ``heads`` and ``ffn``."""
    keys = {"num_layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn}
    return {**{size: integer(values, key, None, where) for size, key in keys.items()}, "swiglu": swiglu}


def _qwen2_5(values: Values, where: str) -> dict[str, object]:
    sizes = _encoder(values, where, swiglu=True)
    whole = values.get("fullatt_block_indexes")
    share = 1 - len(whole) / integer(sizes, "num_layers", None, where) if isinstance(whole, list) else 0.0
    windowed = {"window_pixels": integer(values, "window_size", 112, where), "windowed_share": share} if share else {}
    return {**sizes, **windowed}


def _qwen2(values: Values, where: str) -> dict[str, object]:
    # Qwen2-VL calls its width embed_dim, and hidden_size the decoder's; MLPs are four times as wide.
    width = integer(values, "embed_dim", None, where)
    sizes = {"num_layers": integer(values, "depth", None, where), "hidden": width}
    return {**sizes, "heads": integer(values, "num_heads", None, where), "ffn": 4 * width, "swiglu": False}


def _qwen3(values: Values, where: str) -> dict[str, object]:
    places = values.get("deepstack_visual_indexes")
    deep = {"deepstack_visual_indexes": places} if isinstance(places, list) and places else {}
    return {**_encoder(values, where), **deep}


def _moonvit(values: Values, where: str) -> dict[str, object]:
    names = ("vt_num_hidden_layers", "vt_hidden_size", "vt_num_attention_heads", "vt_intermediate_size")
    sizes = _encoder(values, where, *names)
    if width := integer(values, "qkv_hidden_size", 0, where, 0):
        sizes["head_size"] = width // integer(sizes, "heads", None, where)
    return sizes


def _step(values: Values, where: str) -> dict[str, object]:
    width, ratio = integer(values, "width", None, where), values.get("mlp_ratio", 4)
    if not isinstance(ratio, (int, float)) or not ratio > 0:
        raise ConfigError(f"{where}: mlp_ratio is {shown(ratio)}, must be a number above 0.")
    sizes = {"num_layers": integer(values, "layers", None, where), "hidden": width, "swiglu": False}
    return {**sizes, "heads": integer(values, "heads", None, where), "ffn": round(ratio * width)}


_VISIONS: Mapping[str, Callable[[Values, str], dict[str, object]]] = {
    "qwen2_5": _qwen2_5,
    "qwen2_vl": _qwen2,
    "qwen3_vl": _qwen3,
    "qwen3_omni_moe": _qwen3,
    "qwen3_5": _qwen3,
    "kimi_k25": _moonvit,
    "kimi_k3": _moonvit,
    "mimo_v2": partial(_encoder, swiglu=True),
    "step_robotics": _step,
    "perception_encoder": _step,
    # MLPs as wide as what the encoder gives (Glm4vMoeVisionMlp); intermediate_size is the projector's.
    "glm4v_moe": partial(_encoder, ffn="out_hidden_size", swiglu=True),
    **dict.fromkeys(
        ("intern_vit", "internvl"), partial(_encoder, layers="num_hidden_layers", heads="num_attention_heads")
    ),
}
"""Beginnings of ``model_type``, and how sizes are read."""


def _audio(values: Values, where: str, media: SampleMedia) -> dict[str, object]:
    family = str(values.get("model_type") or "")
    if not family.startswith(_AUDIOS):
        raise ConfigError(f"{where}: encoder {shown(family)} is not known; known: {', '.join(_AUDIOS)}.")
    sizes = _encoder(values, where, "encoder_layers", "d_model", "encoder_attention_heads", "encoder_ffn_dim")
    frames = media.audio_frames or round(media.audio_s * _FRAMES_PER_S)
    return {"type": "gpt", "causal": False, "vocab": 1, **sizes, "seq": max(1, frames)}


def _side(values: Values, key: str, where: str) -> int:
    """Return a size that some files give as a number and others as a pair of equal ones."""
    value = values.get(key)
    return integer({key: value[0]} if isinstance(value, list) and value else values, key, None, where)
