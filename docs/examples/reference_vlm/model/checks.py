"""Compares the built model with its description: layers of every module over the pipeline, parameters of this chunk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
from reference_vlm.configuration import ModelDescription, StackDescription


def stacks_of(model: ModelDescription) -> dict[str, StackDescription]:
    """Return the transformer stacks on the pipeline by the name of their module."""
    stacks = {"text_decoder": model.text.stack}
    if model.vision is not None:
        stacks["image_encoder"] = model.vision.stack
    if model.audio is not None:
        stacks["audio_encoder"] = model.audio.stack
    return {name: stack for name, stack in stacks.items() if name not in model.own_layouts}


def check_layers(chunks: Sequence[Any], model: ModelDescription) -> None:
    """Check the model chunks of this rank. Sums over the pipeline group; a mismatch is ``ConfigError``.

    A process that runs a rank alone has no sums of its peers and checks nothing.
    """
    if os.environ.get(ALONE_VARIABLE):
        return
    names = list(stacks_of(model))
    counts = torch.zeros(len(names), dtype=torch.long, device=torch.cuda.current_device())
    for chunk in chunks:
        for index, name in enumerate(names):
            module = getattr(chunk, name)
            if module is not None:
                block = module.decoder if name == "text_decoder" else module.encoder.blocks
                counts[index] += len(block.layers)
    torch.distributed.all_reduce(counts, group=parallel_state.get_pipeline_model_parallel_group())
    for name, built in zip(names, counts.tolist(), strict=True):
        described = stacks_of(model)[name].num_layers
        if built != described:
            raise ConfigError(
                f"{model.file}: {name} has {described} layers, but the ranks of this pipeline built {built}. "
                "Check pipeline_num_layers against --pipeline-model-parallel-size."
            )


def check_parameters(chunk: Any, model: ModelDescription, padded_vocab_size: int) -> None:
    """Raise ``ConfigError`` when ``chunk`` holds another number of parameters than its part of the description."""
    built = sum(parameter.numel() for parameter in chunk.parameters())
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    described = num_parameters(model, chunk.chunk, tensor_size, padded_vocab_size)
    if built != described:
        raise ConfigError(
            f"{model.file}: stage {chunk.chunk} holds {built} parameters, the description gives {described} "
            f"(tensor parallel {tensor_size}). The model built is not the model described."
        )


def num_parameters(model: ModelDescription, chunk: int, tensor_size: int, padded_vocab_size: int) -> int:
    """Return parameters on one tensor-parallel rank of ``chunk``."""
    total = 0
    for name, stack in stacks_of(model).items():
        total += stack.stages.flat[chunk] * layer_parameters(stack, tensor_size)
        if name == "text_decoder":
            first, last = chunk == stack.stages.first_chunk, chunk == len(stack.stages.flat) - 1
            tables = int(first) + int(last and (model.text.untie_embeddings or not first))
            total += tables * padded_vocab_size // tensor_size * stack.hidden_size
            total += _norm(stack) if last else 0
    if "image_encoder" in stacks_of(model):
        total += _vision_ends(model, chunk, tensor_size)
    if model.generator is not None and "image_generator" not in model.own_layouts:
        total += _generator(model, tensor_size) if chunk == len(model.text.stack.stages.flat) - 1 else 0
    if model.audio is not None and "audio_encoder" in stacks_of(model):
        stack, stages = model.audio.stack, model.audio.stack.stages
        hidden = stack.hidden_size
        if chunk == stages.first_chunk:
            total += 3 * hidden * (model.audio.num_mel_bins + hidden) + 2 * hidden
        if chunk == stages.last_chunk:
            total += _norm(stack) + (hidden + 1) * model.text.stack.hidden_size
    return total


def layer_parameters(stack: StackDescription, tensor_size: int) -> int:
    """Return parameters of one layer on one tensor-parallel rank."""
    hidden, size = stack.hidden_size, stack.kv_channels
    qkv = (stack.num_attention_heads + 2 * stack.num_query_groups) * size // tensor_size
    ffn = stack.ffn_hidden_size // tensor_size
    fc1 = ffn * (2 if stack.gated else 1)
    total = 2 * _norm(stack) + qkv * hidden + stack.num_attention_heads * size // tensor_size * hidden
    total += fc1 * hidden + ffn * hidden
    if stack.add_qkv_bias or stack.add_bias_linear:
        total += qkv
    if stack.add_bias_linear:
        total += hidden + fc1 + hidden
    return total


def _vision_ends(model: ModelDescription, chunk: int, tensor_size: int) -> int:
    vision, projector = model.vision, model.projector
    assert vision is not None and projector is not None
    stack, out = vision.stack, model.text.stack.hidden_size
    total = 0
    if chunk == stack.stages.first_chunk:
        total += vision.num_channels * vision.temporal_patch_size * vision.patch_size**2 * stack.hidden_size
    if chunk == stack.stages.last_chunk:
        ffn = projector.ffn_hidden_size // tensor_size
        total += _norm(stack) + ffn * (stack.hidden_size * vision.spatial_merge_size**2 + 1) + (ffn + 1) * out
    return total


def _generator(model: ModelDescription, tensor_size: int) -> int:
    vision, generator = model.vision, model.generator
    assert vision is not None and generator is not None
    stack = generator.stack
    ends = (model.text.stack.hidden_size + 1) * stack.hidden_size + (stack.hidden_size + 1) * vision.token_features
    return stack.num_layers * layer_parameters(stack, tensor_size) + _norm(stack) + ends


def _norm(stack: StackDescription) -> int:
    return stack.hidden_size * (1 if stack.normalization == "RMSNorm" else 2)
