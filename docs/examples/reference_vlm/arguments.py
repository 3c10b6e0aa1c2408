"""The command line of the reference training: ``--mm-model``, ``--mm-data``, ``--mm-tool``, and the values of
model.json.

If model.json and a flag differ about the text decoder, model.json takes precedence; Megatron's arguments are set from
it, so that its logs, its checkpoint arguments and its own checks describe the trained model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.job import current_job
from mindspeed_autoparallel.runtime.hetero.layouts import check_attribute
from reference_vlm import foreign_flags
from reference_vlm.configuration import ModelDescription, read_data, read_model, read_tools

_FILES = {
    "--mm-model": "model.json: the modules, their sizes, and their layers on each pipeline stage",
    "--mm-data": "data.json: data sets, tokenizer, picture sizes",
    "--mm-tool": "tools.json: profiling tools of MindSpeed-MM",
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return Megatron's ``extra_args_provider``: this training's flags and the accepted flags of other hosts, if they
    are missing."""
    taken = set(parser._option_string_actions)
    section = parser.add_argument_group(title="multimodal model")
    for name, help_text in _FILES.items():
        if name not in taken:
            section.add_argument(name, type=str, default=None, help=help_text)
    # Megatron's own defaults drop a tenth; the described models were trained without dropout.
    parser.set_defaults(hidden_dropout=0.0, attention_dropout=0.0)
    if "--data-balance" not in taken:
        section.add_argument(
            "--data-balance",
            action="store_true",
            help="give the samples of every global batch to replicas and microbatches by their work: the same training",
        )
    section.add_argument(
        "--data-balance-max-tokens",
        type=int,
        default=0,
        help="tokens that --data-balance may give a microbatch, padding included; 0: any number",
    )
    section.add_argument(
        "--pack-samples",
        action="store_true",
        help="lay the texts of a microbatch one after another instead of padding them: each attends to itself alone",
    )
    section.add_argument(
        "--pack-length",
        type=int,
        default=0,
        help="with --data-balance: packs hold any number of samples, --micro-batch-size on the mean, and at most so "
        "many tokens; 0: a pack holds --micro-batch-size samples",
    )
    return foreign_flags.add_foreign_flags(parser)


def describe(arguments: argparse.Namespace) -> ModelDescription:
    """Read the files the arguments name and set Megatron's arguments from model.json (before its validation)."""
    for name in ("--mm-model", "--mm-data"):
        if not getattr(arguments, name.strip("-").replace("-", "_")):
            raise ConfigError(f"{name} is missing; give the {_FILES[name].split(':')[0]} of the training.")
    if arguments.mm_tool:
        read_tools(Path(arguments.mm_tool))
    pipeline_size = arguments.pipeline_model_parallel_size
    model = read_model(Path(arguments.mm_model), pipeline_size, current_job().own_pipelines)
    _check_sizes(model, arguments)
    _check_batches(model, arguments)
    for module in current_job().modules_of_host:
        check_attribute(module, (module.name,))
    foreign_flags.report(foreign_flags.given(arguments), rank=arguments.rank)
    stack = model.text.stack
    settings: dict[str, object] = {
        "hidden_size": stack.hidden_size,
        "ffn_hidden_size": stack.ffn_hidden_size,
        "num_attention_heads": stack.num_attention_heads,
        "group_query_attention": stack.num_query_groups != stack.num_attention_heads,
        "num_query_groups": stack.num_query_groups,
        "kv_channels": stack.kv_channels,
        "normalization": stack.normalization,
        "swiglu": stack.gated and stack.activation == "silu",
        "add_bias_linear": stack.add_bias_linear,
        "add_qkv_bias": stack.add_qkv_bias,
        "max_position_embeddings": max(model.text.max_position_embeddings, arguments.seq_length or 0),
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": model.text.untie_embeddings,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "dataloader_type": "external",
        # Without validation data Megatron would still read eval_iters batches at the end.
        "eval_iters": arguments.eval_iters if read_data(Path(arguments.mm_data)).val_rate else 0,
        "vocab_size": model.text.vocab_size,
        # Megatron requires an equal number of layers per stage; the real split comes from the description.
        "num_layers": -(-stack.num_layers // (pipeline_size * model.virtual_size)) * pipeline_size * model.virtual_size,
    }
    if model.virtual_size > 1:
        settings["num_virtual_stages_per_pipeline_rank"] = model.virtual_size
    for name, value in settings.items():
        setattr(arguments, name, value)
    return model


def settle(arguments: argparse.Namespace, model: ModelDescription) -> None:
    """Set the true number of layers after Megatron's validation."""
    for name in ("num_layers", "encoder_num_layers"):
        if getattr(arguments, name, None) is not None:
            setattr(arguments, name, model.text.stack.num_layers)


def padded_vocab_size(arguments: argparse.Namespace, model: ModelDescription) -> int:
    """Return the vocabulary rounded up to ``--make-vocab-size-divisible-by`` times the tensor-parallel size."""
    multiple = arguments.make_vocab_size_divisible_by * arguments.tensor_model_parallel_size
    size: int = -(-model.text.vocab_size // multiple) * multiple
    return size


def drops(arguments: argparse.Namespace, model: ModelDescription) -> bool:
    """Return whether any module uses dropout, by model.json or the command line."""
    modules = (model.vision, model.audio, model.text, model.generator)
    stacks = [one.stack for one in modules if one is not None]
    return any(
        given if own is None else own
        for stack in stacks
        for own, given in (
            (stack.hidden_dropout, arguments.hidden_dropout),
            (stack.attention_dropout, arguments.attention_dropout),
        )
    )


def pads_to_longest(arguments: argparse.Namespace) -> bool:
    """Return whether ``--variable-seq-lengths`` was given (its attribute is reset by some hosts' validation)."""
    return bool(
        getattr(arguments, "foreign_variable_seq_lengths", False) or getattr(arguments, "variable_seq_lengths", 0)
    )


def _check_batches(model: ModelDescription, arguments: argparse.Namespace) -> None:
    """Check the composition of microbatches."""
    if arguments.pack_length:
        _check_pack_length(arguments)
        arguments.pack_samples = True
    own, context = model.text.stack.attention_dropout, arguments.context_parallel_size
    if arguments.pack_samples and context > 1 and (arguments.attention_dropout if own is None else own):
        raise ConfigError(
            f"--pack-samples with --context-parallel-size {context} goes without attention dropout: set "
            "--attention-dropout 0 (model.json: attention_dropout)."
        )
    if arguments.pack_samples and model.generator is not None:
        raise ConfigError(
            f"--pack-samples cannot be combined with image_generator in {model.file}: a row before an image would be "
            "another sample's. Leave one of them out."
        )
    if arguments.data_balance_max_tokens < 0:
        raise ConfigError(f"--data-balance-max-tokens must be at least 0, got {arguments.data_balance_max_tokens}.")
    if arguments.data_balance_max_tokens and not getattr(arguments, "data_balance", False):
        raise ConfigError("--data-balance-max-tokens needs --data-balance.")


def _check_pack_length(arguments: argparse.Namespace) -> None:
    if arguments.pack_length < 0:
        raise ConfigError(f"--pack-length must be at least 0, got {arguments.pack_length}.")
    if not getattr(arguments, "data_balance", False):
        raise ConfigError("--pack-length needs --data-balance: it says which samples lie together.")
    if arguments.data_balance_max_tokens:
        raise ConfigError("--pack-length limits the tokens of a pack already: leave out --data-balance-max-tokens.")


def _check_sizes(model: ModelDescription, arguments: argparse.Namespace) -> None:
    size = arguments.tensor_model_parallel_size
    stacks = {"text_decoder": model.text.stack}
    # Encoders with their own layout are checked against it when model.json is read for it.
    if model.vision is not None and "image_encoder" not in model.own_layouts:
        stacks["image_encoder.vision_encoder"] = model.vision.stack
    if model.audio is not None and "audio_encoder" not in model.own_layouts:
        stacks["audio_encoder.audio_encoder"] = model.audio.stack
    if model.generator is not None and "image_generator" not in model.own_layouts:
        stacks["image_generator"] = model.generator.stack
        if arguments.sequence_parallel or arguments.context_parallel_size > 1:
            raise ConfigError(
                f"{model.file}: image_generator takes whole images, but --sequence-parallel and "
                "--context-parallel-size cut them. Leave them out, or give it a layout of its own "
                "(--hetero-parallel)."
            )
    for name, stack in stacks.items():
        for key in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            if getattr(stack, key) % size:
                raise ConfigError(
                    f"{model.file}: {name}.{key} is {getattr(stack, key)}, which "
                    f"--tensor-model-parallel-size {size} does not divide. Lower the tensor-parallel size."
                )
