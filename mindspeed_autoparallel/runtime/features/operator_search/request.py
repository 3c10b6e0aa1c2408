"""The flags of an operator search and Megatron's arguments, as the shape of a model and the work of one step."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import made_folder
from mindspeed_autoparallel.operators.config import OperatorConfig, read_config
from mindspeed_autoparallel.operators.pipeline import Pipeline
from mindspeed_autoparallel.operators.presets import Decoder
from mindspeed_autoparallel.operators.search.pins import Pins, parse_pins
from mindspeed_autoparallel.runtime.features.measuring import needed
from mindspeed_autoparallel.runtime.features.operator_search.flags import OperatorSearchFlags
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.megatron.unsearched import (
    refuse_hybrid,
    refuse_several_models,
    refuse_unlike_layers,
)

_FEATURE = "--operator-search"
_SWIGLU_UNIT = 64


@dataclass(frozen=True)
class Work:
    """``global_batch_size`` samples of ``sequence`` tokens on ``devices``, in the script's own layout."""

    shape: Decoder
    global_batch_size: int
    micro_batch_size: int
    sequence: int
    devices: int
    pipeline: Pipeline


@dataclass(frozen=True, kw_only=True)
class OperatorRequest:
    """The model to search, the settings, and the output folder."""

    work: Work
    config: OperatorConfig
    pins: Pins
    explain: str | None
    """Operator whose splits are printed instead of the plan; ``None``: print the plan."""
    output_dir: Path


def read_request(arguments: argparse.Namespace) -> OperatorRequest:
    """Return the checked request and create the output folder; ``ConfigError`` states the problem and its remedy."""
    flags = read_flags(OperatorSearchFlags, arguments)
    output_dir = made_folder(Path(flags.operator_output_dir), "--operator-output-dir")
    return OperatorRequest(
        work=read_work(arguments),
        config=read_settings(flags),
        pins=parse_pins([text for text in (flags.operator_pin or "").split(";") if text]),
        explain=flags.operator_explain,
        output_dir=output_dir,
    )


def read_shape(arguments: argparse.Namespace) -> Decoder:
    """Return the decoder that the parsed (not yet validated) ``arguments`` describe; ``ConfigError`` names a missing
    flag."""
    refuse_several_models(arguments, _FEATURE)
    refuse_hybrid(arguments, _FEATURE)
    refuse_unlike_layers(arguments, _FEATURE)
    hidden, heads = needed(arguments, _FEATURE, "hidden_size"), needed(arguments, _FEATURE, "num_attention_heads")
    gated = bool(getattr(arguments, "swiglu", False))
    # Megatron's defaults, which its validation fills in later.
    usual = int(4 * hidden * 2 / 3 / _SWIGLU_UNIT) * _SWIGLU_UNIT if gated else 4 * hidden
    experts = getattr(arguments, "num_experts", None) or 0
    ffn = getattr(arguments, "ffn_hidden_size", None) or usual
    if experts:
        ffn = getattr(arguments, "moe_ffn_hidden_size", None) or ffn
    grouped = getattr(arguments, "group_query_attention", False)
    kv_heads = needed(arguments, _FEATURE, "num_query_groups") if grouped else heads
    head = getattr(arguments, "kv_channels", None) or 0
    if not head and hidden % heads:
        raise ConfigError(f"--num-attention-heads {heads} does not divide --hidden-size {hidden}.")
    return Decoder(
        num_layers=needed(arguments, _FEATURE, "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=getattr(arguments, "padded_vocab_size", None) or needed(arguments, _FEATURE, "vocab_size"),
        gated=gated,
        num_experts=experts,
        topk=getattr(arguments, "moe_router_topk", None) or 2,
        head_size=head,
    )


def read_work(arguments: argparse.Namespace) -> Work:
    """Return shape, batch, devices and the script's own pipeline."""
    shape = read_shape(arguments)
    nodes = getattr(arguments, "simulated_nnodes", None) or 1
    per_node = getattr(arguments, "simulated_nproc_per_node", None)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    devices = arguments.operator_devices or (nodes * per_node if per_node else started)
    sizes = [getattr(arguments, f"{kind}_model_parallel_size", None) or 1 for kind in ("tensor", "pipeline")]
    context = getattr(arguments, "context_parallel_size", None) or 1
    replicas = max(1, devices // (sizes[0] * sizes[1] * context))
    micro = getattr(arguments, "micro_batch_size", None) or 1
    batch = getattr(arguments, "global_batch_size", None) or micro * replicas
    pipeline = Pipeline(stages=sizes[1], servers=nodes, micro_batch_num=max(1, batch // (micro * replicas)))
    return Work(shape, batch, micro, needed(arguments, _FEATURE, "seq_length"), devices, pipeline)


def read_settings(flags: OperatorSearchFlags) -> OperatorConfig:
    """Return the settings of the YAML file, overridden by the given flags."""
    config = read_config(Path(flags.operator_config)) if flags.operator_config else OperatorConfig()
    given = {name: getattr(flags, name) for name in ("parallel_mode", "search_mode", "mem_coeff")}
    return config.with_flags(flags.auto_pipeline, **given).checked(flags.operator_config or "flags")
