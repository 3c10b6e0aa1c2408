"""The operator graph of a Hugging Face model from its configuration alone: no weights are allocated."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError, first_line
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.torch.capture import capture_program

_FALLBACK = "AutoModel"


def hugging_face_graph(source: str, *, batch: int, sequence: int, num_layers: int | None = None) -> Graph:
    """Capture the model that ``source`` names, a hub name or the path of its config.json, on the meta device.

    The batch has ``batch`` samples of ``sequence`` tokens (or images of the configuration's size); the model is in bf16
    and training mode. Raises ``ConfigError`` if transformers is missing or lacks the model, or if capture fails.
    """
    if batch < 1 or sequence < 1:
        raise ConfigError(f"batch {batch} and sequence {sequence} must both be 1 or more.")
    config = read_model_config(source)
    if num_layers is not None:
        if not hasattr(config, "num_hidden_layers"):
            raise ConfigError(f"--layers: the configuration {source} has no num_hidden_layers to shorten.")
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = build_on_meta(config, source)
    return capture_program(model, (), example_inputs(config, model, batch, sequence)).graph


def read_model_config(source: str) -> Any:
    """Read the configuration at a path, or by a hub name that transformers has cached or can download."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--model hf:.. needs transformers: pip install transformers.") from error
    path = Path(source)
    if path.suffix == ".json" or path.exists():
        path = path / "config.json" if path.is_dir() else path
        content = read_json(path, "model configuration (--model hf:)")
        kind = content.get("model_type") if isinstance(content, dict) else None
        if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(f"{path}: model_type {kind!r} is unknown to transformers {transformers.__version__}.")
        rest = {key: value for key, value in content.items() if key not in ("model_type", "transformers_version")}
        try:
            return transformers.AutoConfig.for_model(kind, **rest)
        except Exception as error:  # transformers' checks raise any class of error
            raise ConfigError(f"{path} is not a configuration of {kind}: {_first_line(error)}") from error
    try:
        return transformers.AutoConfig.from_pretrained(source)
    except Exception as error:  # many classes of error, from the network to the file
        raise ConfigError(
            f"transformers found no configuration called {source}: {_first_line(error)} Give the path of a config.json."
        ) from error


def build_on_meta(config: Any, source: str) -> torch.nn.Module:
    """Build, without weights, the first architecture of the configuration that transformers has, or its base model."""
    import transformers

    names = [*(getattr(config, "architectures", None) or []), _FALLBACK]
    built = next(found for name in names if (found := getattr(transformers, name, None)) is not None)
    make = getattr(built, "from_config", None) or built._from_config
    try:
        with torch.device("meta"):
            model: torch.nn.Module = make(config, dtype=torch.bfloat16)
    except Exception as error:  # constructors raise any class of error
        raise ConfigError(f"{names[0]} of {source} cannot be built: {_first_line(error)}") from error
    with contextlib.suppress(AttributeError, ValueError):  # a model without experts, or an older transformers
        model.set_experts_implementation("grouped_mm")  # loops over experts cannot be captured
    return model.train()


def example_inputs(config: Any, model: torch.nn.Module, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Return the model's main input and, for an encoder-decoder model, that of the decoder.

    Raises ``ConfigError`` if the main input is neither tokens nor images.
    """
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        high, wide = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return {main: torch.empty(batch, channels, high, wide, dtype=torch.bfloat16, device="meta")}
    if main != "input_ids":
        raise ConfigError(f"{type(model).__name__} takes {main}: capture it in Python with inputs of your own.")
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    both = getattr(config, "is_encoder_decoder", False)
    return {main: tokens, **({"decoder_input_ids": tokens.clone()} if both else {})}


def _first_line(error: BaseException) -> str:
    return first_line(error).rstrip(".") + "."
