"""Reads a model.json of MindSpeed-MM; every wrong value names its file, key and allowed range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json
from reference_vlm.configuration import accepted_keys
from reference_vlm.configuration.descriptions import (
    AudioDescription,
    GeneratorDescription,
    ModelDescription,
    ProjectorDescription,
    StackDescription,
    TextDescription,
    VisionDescription,
)
from reference_vlm.configuration.section import Section
from reference_vlm.configuration.stages import (
    NO_OWN_PIPELINES,
    PipelineSizes,
    StageLayers,
    encoder_pipeline,
    read_stages,
    virtual_size_in,
)

ACTIVATIONS = ("gelu", "quick_gelu", "silu", "relu")
GRANULARITIES = ("full", "selective")


def read_model(
    file: Path, pipeline_size: int = 1, own_pipelines: Mapping[str, int] = NO_OWN_PIPELINES
) -> ModelDescription:
    """Read ``file``, a model.json; ``pipeline_size`` comes from the command line, ``own_pipelines`` holds those of
    encoders with their own layout. ``ConfigError`` for any wrong value."""
    return describe_model(read_json(file, "model description (--mm-model)"), file, pipeline_size, own_pipelines)


def _refuse_other_architecture(values: Mapping[str, object], file: Path) -> None:
    model_id = values.get("model_id")
    if model_id is not None and model_id not in accepted_keys.ARCHITECTURES:
        raise ConfigError(
            f"{file}: model_id {model_id!r} is another architecture than the reference training builds "
            f"({', '.join(accepted_keys.ARCHITECTURES)}). Train it with its own script."
        )


def describe_model(
    values: Any, file: Path, pipeline_size: int = 1, own_pipelines: Mapping[str, int] = NO_OWN_PIPELINES
) -> ModelDescription:
    """Describe the model from values already read, as ``read_model`` does; ``file`` is only named in messages."""
    root = Section(values, file)
    root.accept(accepted_keys.MODEL)
    _refuse_other_architecture(values, file)
    text_section = root.child("text_decoder")
    sizes = PipelineSizes(pipeline_size, virtual_size_in(text_section))
    text = _text(text_section, sizes)
    vision, projector, audio = None, None, None
    if "image_encoder" in root:
        image = root.child("image_encoder")
        image.accept(accepted_keys.STACK)
        vision = _vision(image.child("vision_encoder"), encoder_pipeline("image_encoder", sizes, own_pipelines))
        projector = _projector(image.child("vision_projector"), vision, text)
    if "audio_encoder" in root:
        audio = _audio(root.child("audio_encoder"), encoder_pipeline("audio_encoder", sizes, own_pipelines))
    last_id = text.vocab_size - 1
    model = ModelDescription(
        file=file,
        vision=vision,
        projector=projector,
        audio=audio,
        text=text,
        image_token_id=root.integer("img_context_token_id", min(151655, last_id), at_least=0, at_most=last_id),
        vision_start_token_id=root.integer(
            "vision_start_token_id", min(151652, last_id - 1), at_least=0, at_most=last_id
        ),
        vision_end_token_id=root.integer("vision_end_token_id", min(151653, last_id - 2), at_least=0, at_most=last_id),
        audio_token_id=root.integer("audio_token_id", min(151646, last_id - 3), at_least=0, at_most=last_id),
        audio_start_token_id=root.integer(
            "audio_start_token_id", min(151647, last_id - 4), at_least=0, at_most=last_id
        ),
        audio_end_token_id=root.integer("audio_end_token_id", min(151648, last_id - 5), at_least=0, at_most=last_id),
        own_layouts=frozenset(own_pipelines),
        generator=_generator(root, vision, file, own_pipelines) if "image_generator" in root else None,
    )
    root.report_unknown_keys()
    _check_order(model)
    return model


def _check_order(model: ModelDescription) -> None:
    first_text = model.text.stack.stages.first_chunk
    for name, encoder in (("image_encoder.vision_encoder", model.vision), ("audio_encoder.audio_encoder", model.audio)):
        own = name.split(".")[0] in model.own_layouts
        if encoder is not None and not own and encoder.stack.stages.last_chunk > first_text:
            raise ConfigError(
                f"{model.file}: {name}.pipeline_num_layers puts its last layer on stage "
                f"{encoder.stack.stages.last_chunk}, after the first layer of text_decoder on stage {first_text}. "
                "An encoder must end on the text decoder's first stage or before it."
            )
    stacks = [one.stack for one in (model.vision, model.audio, model.text) if one is not None]
    first = min(stack.stages.first_chunk for stack in stacks)
    if first > 0 and not model.own_layouts:
        raise ConfigError(
            f"{model.file}: pipeline_num_layers of all modules leave stage 0 without a layer, the first is on stage "
            f"{first}: a stage needs parameters to train. Move a layer there, or use fewer stages."
        )
    if model.own_layouts and first_text > 0:
        raise ConfigError(
            f"{model.file}: text_decoder.pipeline_num_layers leaves the first stage without a layer; encoders with a "
            "layout of their own hand their rows to the first stage: give it at least 1 layer."
        )
    if model.text.stack.stages.flat[-1] == 0:
        raise ConfigError(
            f"{model.file}: text_decoder.pipeline_num_layers leaves the last stage without a layer; "
            "the output layer lies there: give the last stage at least 1 layer."
        )


def _stack(section: Section, pipeline: PipelineSizes, *, text: bool, normalization: str) -> StackDescription:
    section.accept(accepted_keys.STACK)
    num_layers = section.integer("num_layers")
    hidden_size = section.integer("hidden_size")
    heads = section.integer("num_attention_heads")
    groups = section.integer("num_query_groups", heads, at_most=heads)
    if heads % groups:
        raise section.error("num_query_groups", groups, f"a divisor of num_attention_heads ({heads})")
    if "kv_channels" not in section and hidden_size % heads:
        raise section.error("num_attention_heads", heads, f"a divisor of hidden_size ({hidden_size})")
    stages = read_stages(section, num_layers, pipeline.size, pipeline.virtual_size, all_on_first=not pipeline.even)
    granularity = section.raw("recompute_granularity")
    if granularity is not None:
        section.choice("recompute_granularity", GRANULARITIES)
    return StackDescription(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=section.integer("ffn_hidden_size", 4 * hidden_size),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=section.integer("kv_channels", hidden_size // heads),
        normalization=section.choice("normalization", ("LayerNorm", "RMSNorm"), normalization),
        layernorm_epsilon=section.number("layernorm_epsilon", section.raw("norm_epsilon", 1e-6), at_least=1e-20),
        activation=section.choice("activation_func", ACTIVATIONS, "silu" if text else "quick_gelu"),
        gated=section.flag("gated_linear_unit", section.flag("swiglu", text)),
        add_bias_linear=section.flag("add_bias_linear", not text),
        add_qkv_bias=section.flag("add_qkv_bias", True),
        freeze=section.flag("freeze"),
        stages=stages,
        recompute_granularity=granularity,
        recompute_method=section.choice("recompute_method", ("block", "uniform"), "block"),
        recompute_counts=_recompute_counts(section, stages, granularity),
        hidden_dropout=_rate(section, "hidden_dropout"),
        attention_dropout=_rate(section, "attention_dropout"),
    )


def _rate(section: Section, key: str) -> float | None:
    return section.number(key, at_most=0.99) if key in section else None


def _recompute_counts(section: Section, stages: StageLayers, granularity: str | None) -> tuple[int, ...]:
    key = "recompute_num_layers"
    value = section.raw(key)
    if value is None or granularity != "full":
        return stages.flat if granularity == "full" else (0,) * len(stages.flat)
    if isinstance(value, int):
        counts = [min(section.integer(key, at_least=0), most) for most in stages.flat]
    else:
        rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        counts = [count for row in rows for count in row] if all(isinstance(row, list) for row in rows) else []
    good = len(counts) == len(stages.flat) and all(
        isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= most
        for count, most in zip(counts, stages.flat, strict=False)
    )
    if not good:
        raise section.error(
            key, value, f"a whole number of at least 0, or {len(stages.flat)} counts at most {list(stages.flat)}"
        )
    return tuple(counts)


def _vision(section: Section, pipeline: PipelineSizes) -> VisionDescription:
    stack = _stack(section, pipeline, text=False, normalization="LayerNorm")
    if stack.kv_channels % 4:
        raise section.error("hidden_size", stack.hidden_size, "a multiple of 4 x num_attention_heads (2-D rotary)")
    patch, merge = section.integer("patch_size", 14), section.integer("spatial_merge_size", 2)
    window_size = section.integer("window_size", section.integer("window_attn_size", 0, at_least=0), at_least=0)
    if window_size % (patch * merge):
        raise section.error("window_size", window_size, f"0 or a multiple of {patch * merge} pixels")
    return VisionDescription(
        stack=stack,
        num_channels=section.integer("num_channels", section.integer("in_channels", 3)),
        patch_size=patch,
        temporal_patch_size=section.integer("temporal_patch_size", 2),
        spatial_merge_size=merge,
        window_size=window_size,
        full_attention_layers=section.integers("fullatt_block_indexes"),
    )


def _projector(section: Section, vision: VisionDescription, text: TextDescription) -> ProjectorDescription:
    section.accept(accepted_keys.STACK)
    section.accept(
        (
            "num_layers",
            "num_attention_heads",
            "gated_linear_unit",
            "add_bias_linear",
            "normalization",
            "layernorm_epsilon",
            "vit_hidden_size",
            "llm_hidden_size",
            "num_query_groups",
        )
    )
    merged = vision.stack.hidden_size * vision.spatial_merge_size**2
    expected = {"input_size": vision.stack.hidden_size, "hidden_size": text.stack.hidden_size}
    for key, size in expected.items():
        value = section.integer(key, size)
        if value != size and not (key == "input_size" and value == merged):
            raise section.error(key, value, f"{size}, the width of the module it meets")
    return ProjectorDescription(
        ffn_hidden_size=section.integer("ffn_hidden_size", merged),
        activation=section.choice("activation_func", ACTIVATIONS, "gelu"),
        freeze=section.flag("freeze"),
    )


def _audio(root: Section, pipeline: PipelineSizes) -> AudioDescription:
    root.accept(accepted_keys.STACK)
    section = root.child("audio_encoder")
    section.accept(("max_source_positions", "scale_embedding", "output_dim"))
    stack = _stack(section, pipeline, text=False, normalization="LayerNorm")
    if stack.hidden_size % 2:
        raise section.error("hidden_size", stack.hidden_size, "even (sine positions)")
    projector = root.child("audio_projector")
    projector.accept(accepted_keys.STACK)
    return AudioDescription(
        stack=stack,
        num_mel_bins=section.integer("num_mel_bins", 128),
        num_window_frames=section.integer("n_window", 100, at_least=2),
        freeze_projector=projector.flag("freeze", stack.freeze),
    )


def _generator(
    root: Section, vision: VisionDescription | None, file: Path, own_pipelines: Mapping[str, int]
) -> GeneratorDescription:
    section = root.child("image_generator")
    if vision is None:
        raise ConfigError(
            f"{file}: image_generator learns the patches that image_encoder reads, but the file has no "
            "image_encoder. Describe one, or leave image_generator out."
        )
    return GeneratorDescription(
        stack=_stack(
            section,
            encoder_pipeline("image_generator", PipelineSizes(1, 1), own_pipelines),
            text=False,
            normalization="LayerNorm",
        ),
        loss_weight=section.number("loss_weight", 1.0),
    )


def _text(section: Section, pipeline: PipelineSizes) -> TextDescription:
    stack = _stack(section, pipeline, text=True, normalization="RMSNorm")
    scaling = section.raw("rope_scaling", {})
    if not isinstance(scaling, dict):
        raise section.error("rope_scaling", scaling, "an object")
    sections = section.integers("mrope_section", scaling.get("mrope_section", ()), at_least=1)
    if sections and (len(sections) != 3 or 2 * sum(sections) != stack.kv_channels):
        raise section.error(
            "mrope_section", list(sections), f"three counts that sum to half the head size ({stack.kv_channels // 2})"
        )
    return TextDescription(
        stack=stack,
        vocab_size=section.integer("vocab_size", at_least=8),
        rotary_base=section.integer("rotary_base", int(section.number("rope_theta", 1_000_000, at_least=1.0))),
        mrope_section=sections,
        max_position_embeddings=section.integer("max_position_embeddings", 32768),
        untie_embeddings=section.flag("untie_embeddings_and_output_weights", True),
    )
