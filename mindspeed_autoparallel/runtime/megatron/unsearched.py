"""Refuses models that the searches cannot derive from flags, before Megatron is imported if the flags suffice."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Collection, Sequence

from mindspeed_autoparallel.errors import ConfigError, flag_of, told_in_a_line
from mindspeed_autoparallel.runtime.megatron.description import MODEL_FILE_ARGUMENT, is_llava
from mindspeed_autoparallel.runtime.megatron.hybrid import OLD_ARGUMENT, PATTERN_ARGUMENT, hybrid_pattern

_PATTERNS = (PATTERN_ARGUMENT, OLD_ARGUMENT)
"""Arguments of Megatron with a letter per layer."""
_SWITCH = "is_hybrid_model"
_KINDS = {
    "M": "Mamba",
    "*": "attention",
    "-": "MLP",
    "E": "experts",
    "G": "gated delta net",
    "D": "sparse attention",
    "+": "latent attention",
}
SHARDED = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
"""Arguments of Megatron under which it shards parameters."""
_OPERATORS = "--operator-search"


def refuse_hybrid(arguments: argparse.Namespace, flag: str) -> None:
    """Refuse a model of several kinds of layers in a pattern that ``flag`` or this Megatron cannot cut."""
    pattern = _pattern(arguments)
    if not pattern or (flag != _OPERATORS and hybrid_pattern(arguments)):
        return
    counts = Counter(letter for letter in pattern.partition("/")[0] if letter in _KINDS)
    kinds = ", ".join(f"{number} {_KINDS[letter]}" for letter, number in counts.items())
    if flag == _OPERATORS:
        reason, way_out = "takes layers that are alike", "Use --auto-parallel-mm or --auto-tuning, which measure them"
    else:
        reason = "cuts hybrid models by --hybrid-layer-pattern, which Megatron has from 0.17 on"
        way_out = f"Give the layers by that flag, or leave {flag} out"
    raise ConfigError(f"{flag} {reason}; this hybrid model has {kinds} (pattern {pattern}). {way_out}.")


def refuse_several_models(arguments: argparse.Namespace, flag: str) -> None:
    """Refuse a model of an encoder and a decoder if ``flag`` supports only a decoder."""
    if getattr(arguments, MODEL_FILE_ARGUMENT, None):
        described = "--mm-model describes a multimodal model"
    elif is_llava(arguments):
        described = "this script trains a vision model with the language model"
    else:
        return
    raise ConfigError(
        f"{flag} takes one language model that flags describe, and {described}. Use --auto-parallel-mm, which plans "
        "both together."
    )


def refuse_unlike_layers(arguments: argparse.Namespace, flag: str) -> None:
    """Refuse a model unless all layers are alike: plain or grouped attention with an MLP or experts."""
    frequency = getattr(arguments, "moe_layer_freq", None)
    alike = frequency in (None, 1) or (isinstance(frequency, list) and len(set(frequency)) == 1)
    others = {
        "latent attention (--multi-latent-attention)": bool(getattr(arguments, "multi_latent_attention", False)),
        "layers that predict further tokens (--mtp-num-layers)": bool(getattr(arguments, "mtp_num_layers", None)),
        "layers with and without experts (--moe-layer-freq)": bool(getattr(arguments, "num_experts", None))
        and not alike,
    }
    found = " and ".join(name for name, there in others.items() if there)
    if found:
        raise ConfigError(
            f"{flag} takes layers with plain or grouped attention that are all alike; this model has {found}. Use "
            "--auto-parallel-mm or --auto-tuning, which measure the layers as they are."
        )


def refuse_sharded_parameters(arguments: argparse.Namespace, flag: str) -> None:
    """Refuse a script that shards its parameters: the search would price it as plain data parallelism."""
    given = [name for name in SHARDED if getattr(arguments, name, False)]
    if not given:
        return
    version = getattr(arguments, "megatron_fsdp_version", 1)
    if version != 1:
        way_out = "Leave it out: no search describes this version"
    elif flag == "--auto-tuning" and given[0] != "use_torch_fsdp2":
        way_out = f"Leave it out: {flag} tries Megatron FSDP itself where the release has it"
    else:
        way_out = "Plan it by mindspeed-autoparallel plan --fsdp2 SCRIPT, or leave it out"
    by = flag_of(given[0]) + (f" (version {version})" if version != 1 else "")
    raise ConfigError(
        f"{flag} prices gradients and optimizer states, and this script also shards its parameters by {by}. {way_out}."
    )


def refuse_batch_schedule(arguments: argparse.Namespace, flag: str) -> None:
    """Refuse a global batch that changes during the training; Megatron accepts no --global-batch-size with it."""
    if schedule := getattr(arguments, "step_batch_size_schedule", None):
        raise ConfigError(
            f"{flag} is for one global batch, and --step-batch-size-schedule {schedule} changes it during the "
            "training. Replace it by --global-batch-size with the batch to plan for."
        )


def refuse_hybrid_command(flags: Collection[str], argv: Sequence[str]) -> None:
    """End the process if ``flags`` has the operator search and ``argv`` describes a hybrid model.

    ``argv`` is read first because importing Megatron takes long. Values from defaults of the script or a YAML file are
    checked by ``refuse_hybrid`` in the parsed arguments.
    """
    if _OPERATORS not in flags:
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (*_PATTERNS, "num_layers"):
        parser.add_argument(flag_of(name), "--" + name)
    parser.add_argument(flag_of(_SWITCH), "--" + _SWITCH, action="store_true")
    # The host's own parser has the better message for an invalid argument.
    with contextlib.suppress(argparse.ArgumentError), told_in_a_line():
        refuse_hybrid(parser.parse_known_args(list(argv))[0], _OPERATORS)


def _pattern(arguments: argparse.Namespace) -> str:
    """Return the layers of a hybrid model by letter (``M*-M*-``: Mamba, attention, MLP); empty for others."""
    for name in _PATTERNS:
        if pattern := getattr(arguments, name, None):
            return str(pattern)
    layers = str(getattr(arguments, "num_layers", None) or 1)
    return "M" * (int(layers) if layers.isdigit() else 1) if getattr(arguments, _SWITCH, False) else ""
