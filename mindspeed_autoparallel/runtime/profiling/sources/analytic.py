"""Computes a profile from the shapes in the host's arguments and model.json, for a device of the catalogue."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.cost.analytic.request_keys import OPTIMIZERS
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile, stated_work
from mindspeed_autoparallel.predict.megatron_arguments import model_of_arguments, switches_of_arguments
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.predict.useful_work import UsefulWork
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.redaction import masked_words
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.mindspeed import expert_tensor_sizes, sums_encoder_gradients, tensor_grid
from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends

_LOGGER = logging.getLogger(__name__)


def kind_of(device: Device) -> str:
    """Return ``npu``, ``cuda`` or ``cpu``: the device kind of Megatron's features."""
    if device.name == "CPU":
        return "cpu"
    return "npu" if "ascend" in device.name.lower() else "cuda"


def computed_profile(
    arguments: argparse.Namespace, description: Description, device: Device, devices_per_node: int
) -> Profile:
    """Return a profile of the modules of ``description`` on ``device``, with the script's own switches (precision,
    fused kernels, overlaps).

    The profile points include the script's context-parallel size. Assumptions are logged. Raises ``ConfigError`` for
    an optimizer or a switch that is not modelled.
    """
    optimizer = getattr(arguments, "optimizer", None)
    if optimizer and optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"--optimizer {optimizer} has no computed costs, which are those of {' and '.join(OPTIMIZERS)}: measure "
            "the training (--profile-source measured)."
        )
    sections = _sections(arguments, description)
    _LOGGER.info(
        "analytic: nothing is measured; costs are computed for %s from datasheet and efficiencies", device.name
    )
    computed = partial(
        analytic_profile,
        sections,
        device,
        devices_per_node,
        command=" ".join(masked_words([Path(sys.argv[0]).name, *sys.argv[1:]])),
        train=switches_of_arguments(vars(arguments)),
        tensor_grid=tensor_grid(arguments),
    )
    profile = computed()
    own, points = int(getattr(arguments, "context_parallel_size", 1) or 1), [one.at for one in profile.measurements]
    every = points
    if tensor_grid(arguments) or (sums_encoder_gradients(description.content) and not arguments.sequence_parallel):
        points = [replace(point, sequence_parallel=False) for point in points]
    if expert_tensor_sizes(arguments) == (0,):
        points = [point for point in points if not point.expert_tensor_size]
    if points != every:
        profile = computed(points=points)
    if own not in {point.context_size for point in points}:
        # Short sequences are split only if the script splits them.
        whole = [point for point in points if point.context_size == 1]
        profile = computed(points=[*points, *(replace(point, context_size=own) for point in whole)])
    provenance = replace(profile.provenance, model_hash=description.model_hash)
    return replace(profile, interleaved_sends=interleaved_sends(arguments), provenance=provenance)


def useful_work_of(
    arguments: argparse.Namespace, description: Description, num_tokens: Mapping[str, int]
) -> UsefulWork | None:
    """Return the operations and active parameters of the script's model; ``None`` if some are unknown.

    ``num_tokens``: measured tokens of a sample, by module, for modules without tokens in model.json.
    """
    try:
        return stated_work(_sections(arguments, description, num_tokens))
    except (AutoParallelError, AttributeError, KeyError):
        return None


_KEYS = {
    "num_layers": "num_layers",
    "hidden": "hidden_size",
    "head_size": "kv_channels",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "ffn": "ffn_hidden_size",
    "num_experts": "num_moe_experts",
}
"""Keys of model.json by the key of a request."""
_NEEDED = ("hidden", "heads")


def _sections(
    arguments: argparse.Namespace, description: Description, num_tokens: Mapping[str, int] | None = None
) -> tuple[Section, ...]:
    if description.model_file is None:
        if len(description.modules) > 1:
            raise ConfigError(
                f"--profile-source analytic computes language models and those of a model.json; this script builds "
                f"{' and '.join(module.name for module in description.modules)} from its flags. Measure it "
                "(--profile-source measured)."
            )
        return (Section("text_decoder", model_of_arguments(vars(arguments))),)
    sections = []
    for module in description.modules:
        is_last = module is description.modules[-1]
        shape = _of_block(description.block_of(module), arguments, is_last=is_last)
        if missing := [_KEYS[name] for name in _NEEDED if name not in shape]:
            raise ConfigError(
                f"model.json has no {' and '.join(missing)} of {module.name}, from which costs are computed: measure "
                "the training (--profile-source measured)."
            )
        if "seq" not in shape and (measured := (num_tokens or {}).get(module.name)):
            shape["seq"] = measured
        if "seq" not in shape:
            shape["seq"] = int(arguments.seq_length)
            _LOGGER.info(
                f"{module.name}: model.json has no tokens per sample; --seq-length {shape['seq']} is used. "
                "Measure (--profile-source measured) where its share matters."
            )
        sections.append(Section(module.name, shape, module.frozen, module.deepstack_layers))
    return tuple(sections)


def _given(**values: Any) -> dict[str, object]:
    return {name: value for name, value in values.items() if value}


def _of_block(block: Mapping[str, object], arguments: argparse.Namespace, *, is_last: bool) -> dict[str, object]:
    shape: dict[str, object] = {
        "swiglu": bool(block.get("gated_linear_unit", False)),
        "causal": is_last,
        **_given(
            **{name: block.get(key) for name, key in _KEYS.items()},
            topk=block.get("moe_router_topk") if block.get("num_moe_experts") else None,
        ),
    }
    image, patch = block.get("image_size"), block.get("patch_size")
    if is_last:
        vocabulary = block.get("vocab_size") or getattr(arguments, "padded_vocab_size", None) or arguments.vocab_size
        shape |= _given(seq=arguments.seq_length, vocab=vocabulary)
        shape["tied_embeddings"] = not block.get(
            "untie_embeddings_and_output_weights", getattr(arguments, "untie_embeddings_and_output_weights", False)
        )
    elif isinstance(image, int) and isinstance(patch, int) and image >= patch > 0:
        shape["seq"] = (image // patch) ** 2
    return shape
