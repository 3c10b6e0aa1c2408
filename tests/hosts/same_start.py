"""Parameters by their name and place in the whole model alone, so that every layout of a host starts from one model.

A copy of a host's script calls ``install()`` before its training. Checkpoints that are resharded would do the same, and
0.12's and pretrain_vlm.py's are not (docs/hosts.md).
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

CHUNKS: list[Any] = []
"""Of the model that was filled last."""
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^(.*\blocal_experts)\.(\d+)\.(.*)$")


def install() -> None:
    """Fill the model right before Megatron makes an optimizer for it."""
    from megatron.training import training

    make_optimizer = training.get_megatron_optimizer

    @functools.wraps(make_optimizer)
    def filled_first(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        CHUNKS[:] = model_chunks
        for chunk in model_chunks:
            model = chunk
            while hasattr(model, "module"):
                model = model.module
            for place, module in model.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    _fill(model, place, name, module, parameter)
        return make_optimizer(config, model_chunks, *args, **kwargs)

    training.get_megatron_optimizer = filled_first


def _fill(model: Any, place: str, name: str, module: Any, parameter: torch.Tensor) -> None:
    whole = _whole_name(model, f"{place}.{name}")
    size, rank = _shards(module, whole)
    split = size > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
    dimension, shape = getattr(parameter, "partition_dim", 0), list(parameter.shape)
    if split:
        shape[dimension] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
    values = 0.02 * torch.randn(shape, generator=generator)
    if "norm" in whole:
        values += 1.0
    if split:
        owner = model.get_submodule(place.rpartition(".")[0])
        parts = values.split([size * own for own in _parts(whole, owner, module, parameter, dimension)], dimension)
        values = torch.cat([part.chunk(size, dimension)[rank] for part in parts], dimension)
    if isinstance(parameter, DTensor):  # sharded by fully_shard
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    with torch.no_grad():
        parameter.copy_(values)


def _parts(name: str, owner: Any, module: Any, parameter: torch.Tensor, dimension: int) -> list[int]:
    """Return sizes on this rank of what lies one below the other in a matrix, each split by itself.

    ``owner``: the module that holds the parameter's ``module``.
    """
    own = parameter.shape[dimension]
    if (sizes := getattr(owner, "in_proj_split_sections", None)) and dimension == 0:  # a gated delta net's
        return list(sizes) if "in_proj" in name else list(sizes[:3]) if "conv1d" in name else [own]
    if sizes := getattr(parameter, "partition_sizes", None):  # Mamba's projection
        return list(sizes)
    if "linear_fc1" in name and bool(getattr(module.config, "gated_linear_unit", False)):
        return [own // 2, own // 2]
    return [own]


def _whole_name(model: Any, name: str) -> str:
    """Return ``name`` with the numbers that layers and experts have in the whole model."""
    from megatron.core import parallel_state

    if found := _EXPERT.match(name):
        first = parallel_state.get_expert_model_parallel_rank() * len(model.get_submodule(found[1]))
        name = f"{found[1]}.{first + int(found[2])}.{found[3]}"
    if found := _LAYER.match(name):
        layer = model.get_submodule(f"{found[1]}.{found[2]}")
        number = getattr(layer, "layer_number", int(found[2]) + 1)
        # MindSpeed-LLM's --num-layer-list: layer_number counts as if all stages were alike.
        offsets = getattr(getattr(layer, "config", None), "layer_offset", None)
        if offsets:
            number = offsets[parallel_state.get_pipeline_model_parallel_rank()] + int(found[2]) + 1
        # MindSpeed-MM's lists of stages: there, too.
        if counts := getattr(getattr(layer, "config", None), "pipeline_num_layers", None):
            rank = parallel_state.get_pipeline_model_parallel_rank()
            if isinstance(counts[0], int):
                number = sum(counts[:rank]) + int(found[2]) + 1
        number -= sum(place < number - 1 for place in _noop_layers())
        name = f"{found[1]}.{number}.{found[3]}"
    owner, found_output, own = name.partition("output_layer.")
    if found_output and getattr(model.get_submodule(owner.rstrip(".")), "share_embeddings_and_output_weights", False):
        # Under pipelines the last stage holds a copy of a tied embedding as its output layer.
        name = f"{owner}embedding.word_embeddings.{own}"
    return name


def _noop_layers() -> set[int]:
    """Return the places of layers that do nothing, which MindSpeed-LLM counts among all."""
    from megatron.training import get_args

    places = getattr(get_args(), "noop_layers", None) or ()
    return {int(place) for place in (places.split(",") if isinstance(places, str) else places)}


def _shards(module: Any, name: str) -> tuple[int, int]:
    """Return over how many tensor ranks ``module`` is split, and which of them this is."""
    from megatron.core import parallel_state

    if ".local_experts." in name:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    group = getattr(module, "tp_group", None)
    if group is not None:
        return group.size(), group.rank()
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
