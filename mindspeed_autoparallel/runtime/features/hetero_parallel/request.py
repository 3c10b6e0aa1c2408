"""``--hetero-parallel``: the layouts of model.json, checked together with the host's arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.runtime.hetero.building import adapter_class
from mindspeed_autoparallel.runtime.hetero.layouts import (
    HeteroLayout,
    check_attribute,
    check_batch,
    check_scale,
    check_script_sizes,
    encoder_scale,
    read_layout,
    read_model,
)

_REFUSED = {
    "use_torch_fsdp2": "FSDP2 shards parameters by one layout for the whole model; leave --use-torch-fsdp2 out",
    "use_megatron_fsdp": "FSDP shards parameters by one layout for the whole model; leave --use-megatron-fsdp out",
    "data_parallel_random_init": "replicas of every module start equal; leave --data-parallel-random-init out",
    "init_model_with_meta_device": "encoders are built for real; leave --init-model-with-meta-device out",
    "overlap_param_gather_with_optimizer_step": "modules step one after another; leave "
    "--overlap-param-gather-with-optimizer-step out",
    "lazy_mpu_init": "the groups of all modules are made at once; leave --lazy-mpu-init out",
}
"""Arguments of Megatron that hetero parallel does not support, and why."""
_VIRTUAL_FLAGS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)


@dataclass(frozen=True, kw_only=True)
class HeteroRequest:
    """The layouts of the training."""

    layout: HeteroLayout
    scales: dict[str, int]
    """By encoder: number of the backbone's microbatches in a macro-batch."""
    micro_batch_size: int
    """Micro batch of the backbone, in samples."""
    world_size: int


def _check_checkpoint_format(arguments: argparse.Namespace, layout: HeteroLayout) -> None:
    """Refuse ``--ckpt-format torch``, which saves only the backbone's first replica, if its ranks do not hold the whole
    model."""
    if getattr(arguments, "ckpt_format", None) != "torch" or not getattr(arguments, "save", None):
        return
    staged = [module for module in layout.others if module.pipeline_size > 1]
    if staged:
        raise ConfigError(
            "--ckpt-format torch writes one file per tensor and pipeline rank of the backbone, but "
            f"{staged[0].name} has pp {staged[0].pipeline_size}: parts would be lost. Use --ckpt-format torch_dist."
        )
    split = [module for module in layout.others if layout.backbone.tensor_size % module.tensor_size]
    if split or getattr(arguments, "use_distributed_optimizer", False):
        why = (
            f"{split[0].name} has tp {split[0].tensor_size}, which does not divide the backbone's tp "
            f"{layout.backbone.tensor_size}"
            if split
            else "the distributed optimizer's state lies on all ranks of every module"
        )
        raise ConfigError(
            f"--ckpt-format torch writes one file per tensor and pipeline rank of the backbone, but {why}: parts would "
            "be lost. Use --ckpt-format torch_dist."
        )


def _check_generators(arguments: argparse.Namespace, layout: HeteroLayout, num_microbatches: int) -> None:
    """Raise ``ConfigError`` for generators with virtual stages by flag, or with fewer microbatches than stages."""
    if not layout.generators:
        return
    name, stages = layout.generators[0].name, layout.backbone.pipeline_size
    given = [flag for flag in _VIRTUAL_FLAGS if getattr(arguments, flag, None)]
    if given:
        raise ConfigError(
            f"{name} follows the 1F1B schedule, but {flag_of(given[0])} gives the backbone virtual stages. "
            "Leave it out."
        )
    if num_microbatches < stages:
        raise ConfigError(
            f"{name} needs at least as many microbatches as the backbone has stages, but a step has "
            f"{num_microbatches} for {stages} stages. Raise --global-batch-size or lower pp of {layout.backbone.name}."
        )


def read_request(arguments: argparse.Namespace) -> HeteroRequest:
    """Return the checked layouts and batch; ``ConfigError`` before any process group exists."""
    path, model = read_model(arguments)
    return check_layouts(model, arguments, int(os.environ.get("WORLD_SIZE", "1")), str(path))


def check_layouts(
    model: Mapping[str, object], arguments: argparse.Namespace, world_size: int, source: str
) -> HeteroRequest:
    """Return the layouts of ``model`` for ``world_size`` processes, checked against the host's ``arguments``.

    Raises ``ConfigError``; ``source``: the origin of ``model``, for the message.
    """
    for name, why in _REFUSED.items():
        if getattr(arguments, name, None):
            raise ConfigError(f"--hetero-parallel cannot be combined with {flag_of(name)}: {why}.")
    check_script_sizes(
        arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size, arguments.context_parallel_size
    )
    layout = read_layout(model, world_size=world_size, source=source)
    backbone = layout.backbone
    for module in layout.others:
        if module.adapter is not None:
            known = getattr(adapter_class(module.name, module.adapter), "attributes", None)
            if known is not None:
                check_attribute(module, known)
    own_size = backbone.micro_batch_size
    micro_batch_size = arguments.micro_batch_size if own_size is None else own_size
    if not micro_batch_size:
        raise ConfigError("--micro-batch-size is missing; it is the backbone's.")
    scale = int(getattr(arguments, "hetero_encoder_mbs_scale", 1))
    scales = {m.name: encoder_scale(m, micro_batch_size, scale) for m in layout.encoders}
    replicas = backbone.data_parallel_size(world_size)
    if getattr(arguments, "rampup_batch_size", None):
        num_microbatches = check_batch(int(arguments.rampup_batch_size[0]), micro_batch_size, replicas)
    else:
        global_batch_size = arguments.global_batch_size or micro_batch_size * replicas
        num_microbatches = check_batch(global_batch_size, micro_batch_size, replicas)
    for module in layout.encoders:
        own = f"{module.name}.mbs {module.micro_batch_size} means a scale that"
        said_by = "--hetero-encoder-mbs-scale" if module.micro_batch_size is None else f"{source}: {own}"
        check_scale(scales[module.name], num_microbatches, said_by)
    _check_checkpoint_format(arguments, layout)
    _check_generators(arguments, layout, num_microbatches)
    return HeteroRequest(layout=layout, scales=scales, micro_batch_size=micro_batch_size, world_size=world_size)
