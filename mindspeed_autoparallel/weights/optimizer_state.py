"""The state of Adam in rank folders, read without Megatron, as tensors with the names and shapes of their weights.

A plain optimizer has a state for every parameter, numbered by groups. A distributed one keeps a flat buffer a chunk in
``distrib_optim.pt``: parameters from the last to the first, with gaps. The buffer ``param`` holds their fp32 values, by
which every position is found and verified: each has the bits of the weight in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights.architecture import Architecture
from mindspeed_autoparallel.weights.parameter_groups import decays, has_decay, inner
from mindspeed_autoparallel.weights.pickles import load_tensors_only
from mindspeed_autoparallel.weights.rank_files import Chunks, chunk_keys
from mindspeed_autoparallel.weights.rank_folders import RankFolderSource
from mindspeed_autoparallel.weights.spelling import canonical_names

if TYPE_CHECKING:
    import torch


FILE = "distrib_optim.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
_NOT_STEPPED = ("_extra_state", "inv_freq", "expert_bias", "local_tokens_per_expert")
PREFIX = "optimizer.state."
Named = dict[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer's state, with which a training resumes.

    ``sources``: prefix of a weight's key in ``torch_dist`` -> reader of the state under the weights' names.
    ``common``: iteration, schedule, arguments, settings of parameter groups. ``parts``: entries of
    every optimizer in the first rank's file. ``buffer_key``: key of a buffer in ``distrib_optim.pt``; None for a plain
    optimizer.
    """

    sources: dict[str, RankFolderSource]
    common: dict[str, object]
    parts: list[Named]
    buffer_key: object = None


def has_state(weights: RankFolderSource) -> bool:
    """Return whether the rank folders of ``weights`` hold an optimizer's state."""
    content = load_tensors_only(weights.any_file())
    return isinstance(content, dict) and bool(content.get("optimizer"))


def read_state(weights: RankFolderSource) -> OptimizerState:
    """Return the state of ``weights``; ``ConfigError`` if it is not Adam's or a position cannot be verified."""
    content = load_tensors_only(weights.any_file())
    distributed = (weights.any_file().parent / FILE).exists()
    parts = _parts(content["optimizer"])
    kinds = ["param", *MOMENTS] if distributed else list(MOMENTS)
    if not distributed and "fp32_from_fp16_params" in parts[0]:
        kinds.append("fp32_param")
    read = _read_distributed if distributed else _read_plain
    sources = {
        f"{PREFIX}{kind}.": RankFolderSource(
            weights.folder, weights.architecture, chunks=_reader(read, kind), keeps_padding=True, absent=_NOT_STEPPED
        )
        for kind in kinds
    }
    key = _buffer_key(weights.any_file().parent / FILE) if distributed else None
    return OptimizerState(sources, _common(content, parts, distributed, weights.architecture), parts, key)


def _buffer_key(path: Path) -> object:
    stored = load_tensors_only(path)
    held = [one for one in (stored if isinstance(stored, list) else [stored]) if one is not None]
    return next(iter(held[0][0]))


def _reader(read: Callable[[Path, str], list[Named]], kind: str) -> Callable[[Path, int], Chunks]:
    return lambda path, experts_per_rank: [canonical_names(one, experts_per_rank) for one in read(path, kind)]


def _weights(content: Named, path: Path) -> list[Named]:
    """Return the parameters of every chunk under the names of the file, in Megatron's order."""
    return [
        {
            name: value
            for name, value in content[key].items()
            if hasattr(value, "numel") and not name.endswith(_NOT_STEPPED)
        }
        for key in chunk_keys(content, path)
    ]


def _parts(optimizer: Any) -> list[Named]:
    """Return the state of every optimizer: experts have their own if EP is above 1."""
    found = optimizer if isinstance(optimizer, list) else [optimizer]
    if not found or not all(isinstance(one, dict) and "param_groups" in inner(one) for one in found):
        raise ConfigError("the optimizer state is not of a form that Megatron's Adam has. Give --weights-only.")
    return found


def _read_distributed(path: Path, kind: str) -> list[Named]:
    weights = _weights(load_tensors_only(path), path)
    stored = load_tensors_only(path.parent / FILE)
    optimizers = stored if isinstance(stored, list) else [stored]
    found: list[Named] = [{} for _ in weights]
    for number, optimizer in enumerate(optimizers):
        if optimizer is None:
            continue  # in the file of another expert rank
        buffers = [optimizer[key] for key in sorted(key for key in optimizer if isinstance(key, int))]
        for chunk, (buffer, named) in enumerate(zip(buffers, weights, strict=True)):
            if len(buffer) != 1:
                raise ConfigError(f"{path.parent / FILE}: weights of {len(buffer)} types in one chunk are not read.")
            (flat,) = buffer.values()
            mine = _of_optimizer(named, number, len(optimizers))
            for name, begin in placed(mine, flat["param"], path.parent / FILE).items():
                shape = named[name].shape
                found[chunk][name] = flat[kind][begin : begin + shape.numel()].view(shape)
    return found


def _of_optimizer(named: Named, number: int, count: int) -> Named:
    """Return the parameters that the optimizer ``number`` steps: the second of two steps the experts."""
    if count == 1:
        return named
    return {name: value for name, value in named.items() if (".experts." in name) == bool(number)}


def _read_plain(path: Path, kind: str) -> list[Named]:
    content = load_tensors_only(path)
    weights = _weights(content, path)
    parts = _parts(content["optimizer"])
    found: list[Named] = [{} for _ in weights]
    for number, part in enumerate(parts):
        groups = inner(part)["param_groups"]
        state = inner(part)["state"]
        waiting = [list(enumerate(group["params"])) for group in groups]
        for chunk, named in enumerate(weights):
            for name, weight in _of_optimizer(named, number, len(parts)).items():
                group = _group_of(name, weight, groups)
                if not waiting[group]:
                    raise ConfigError(
                        f"{path}: the optimizer has no state for {name}: it was not trained, or is no Adam's."
                    )
                index, key = waiting[group].pop(0)
                value = part["fp32_from_fp16_params"][group][index] if kind == "fp32_param" else state[key][kind]
                if value.shape != weight.shape:
                    raise ConfigError(
                        f"{path}: the optimizer's state at the place of {name} has the shape {list(value.shape)}, the "
                        f"weight {list(weight.shape)}: its parameter groups are not Megatron's. Give --weights-only."
                    )
                found[chunk][name] = value
        if any(waiting):
            raise ConfigError(f"{path}: the optimizer has {sum(map(len, waiting))} states that belong to no weight.")
    return found


def _group_of(name: str, weight: Any, groups: list[Mapping[str, object]]) -> int:
    """Return the number of the group of a parameter: Megatron decays no bias and no vector."""
    decayed = decays(name, weight.dim())
    for number, group in enumerate(groups):
        if has_decay(group) == decayed and group["params"]:
            return number
    return next((number for number, group in enumerate(groups) if group["params"]), 0)


def _common(content: Named, parts: list[Named], distributed: bool, architecture: Architecture) -> dict[str, Any]:
    """Return the entries of a file's content that Megatron's distributed checkpoints keep in addition to tensors."""
    from argparse import Namespace

    metadata: dict[str, object] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if distributed:
        metadata |= {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    found = [_settings(part, distributed) for part in parts]
    arguments = vars(content["args"]) if "args" in content else {}
    arguments = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str | None)}
    kept = ("iteration", "opt_param_scheduler", "num_floating_point_operations_so_far", "checkpoint_version")
    return {
        **{name: content[name] for name in kept if name in content},
        "args": Namespace(**{**arguments, "ckpt_format": "torch_dist"}),
        "content_metadata": metadata,
        "optimizer": found[0] if len(found) == 1 else dict(enumerate(found)),
    }


def _settings(part: Named, distributed: bool) -> Named:
    """Return an optimizer's state without its tensors, in the form of a distributed checkpoint."""
    held = inner(part)
    groups = [{name: value for name, value in group.items() if name != "params"} for group in held["param_groups"]]
    settings: Named = {name: value for name, value in held.items() if name not in ("state", "param_groups")}
    settings["param_groups"] = groups
    steps = {float(one["step"]) for one in held.get("state", {}).values() if "step" in one}
    if len(steps) > 1:
        raise ConfigError(f"the optimizer has taken {sorted(steps)} steps: parameters of different ages are not read.")
    if not distributed:
        settings["state"] = {"common_step": next(one["step"] for one in held["state"].values())} if steps else {}
    if held is part:
        return settings
    rest = {name: value for name, value in part.items() if name not in ("optimizer", "fp32_from_fp16_params")}
    extra = {"param_state_sharding_type": "fully_reshardable"} if distributed else {}
    return {**rest, **extra, "optimizer": settings}


ALIGNED = 64
"""Alignment: a parameter begins at a multiple of this number of values in its bucket."""


def placed(named: dict[str, torch.Tensor], flat: Any, where: object) -> dict[str, int]:
    """Return name -> first value in ``flat`` (fp32, one dimension) of the tensors ``named``, in their order.

    Megatron stores them from the last to the first, aligned in buckets whose ends it does not record: after every
    parameter the next one follows aligned, or at once in a new bucket. Every returned position holds the bits of
    its tensor. Raises ``ConfigError`` if there is no such sequence.
    """
    order = list(reversed(named.items()))
    # Choices not yet tried: (number of the tensor, its place, first value of its bucket).
    waiting: list[tuple[int, int, int]] = [(0, 0, 0)]
    begins = [0] * len(order)
    furthest = 0
    while waiting:
        number, begin, bucket = waiting.pop()
        tensor = order[number][1]
        if not _holds(flat, begin, tensor):
            continue
        begins[number] = begin
        furthest = max(furthest, number + 1)
        end = begin + tensor.numel()
        if number + 1 == len(order):
            if end <= flat.numel() < end + ALIGNED:
                return {one: begins[at] for at, (one, _) in enumerate(order)}
            continue
        waiting += [(number + 1, *choice) for choice in _next(end, bucket)]
    lost = order[min(furthest, len(order) - 1)][0]
    raise ConfigError(
        f"{where}: the place of {lost} in the optimizer's buffer cannot be proved: {furthest} of {len(order)} weights "
        "were found. It was frozen, or the optimizer is of another step than the weights. Give --weights-only."
    )


def aligned(end: int, bucket: int) -> int:
    """Return the position of the parameter after one that ends at ``end`` in the bucket that begins at ``bucket``."""
    return bucket + -(-(end - bucket) // ALIGNED) * ALIGNED


def _next(end: int, bucket: int) -> Iterator[tuple[int, int]]:
    """Yield candidate (position, bucket) of the parameter after one that ends at ``end``; the likeliest last."""
    begin = aligned(end, bucket)
    if begin != end:
        yield end, end
    yield begin, bucket


def _holds(flat: Any, begin: int, tensor: Any) -> bool:
    import torch

    values = flat[begin : begin + tensor.numel()]
    if values.numel() < tensor.numel():
        return False
    return bool(torch.equal(values.to(tensor.dtype), tensor.detach().reshape(-1)))
