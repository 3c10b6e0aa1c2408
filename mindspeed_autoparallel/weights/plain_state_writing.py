"""The state of a plain Adam, written for another layout: parameters numbered by groups, in the order of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_autoparallel.weights import tensors
from mindspeed_autoparallel.weights.optimizer_state import MOMENTS, PREFIX
from mindspeed_autoparallel.weights.parameter_groups import Group, decays, group_for, groups_of_rank, inner
from mindspeed_autoparallel.weights.placement import Entry
from mindspeed_autoparallel.weights.state_order import OrderedState, Place, RankFile
from mindspeed_autoparallel.weights.torch_file import StoredTensor, TorchFile


def write_plain(
    ordered: OrderedState, chunks: list[list[Entry]], files: Mapping[Place, RankFile]
) -> dict[Place, list[dict[str, object]]]:
    kinds = [kind.removeprefix(PREFIX).removesuffix(".") for kind in ordered.state.sources]
    found: dict[Place, list[dict[str, object]]] = {place: [] for place in files}
    for number, part in enumerate(ordered.state.parts):
        groups = {place: groups_of_rank(part, ordered.held_by(file, number, chunks)) for place, file in files.items()}
        # Rank -> group -> kind -> what stands for the state of each parameter.
        held: dict[Place, list[dict[str, list[StoredTensor]]]] = {
            place: [{kind: [] for kind in kinds} for _ in groups[place]] for place in files
        }
        for kind in kinds:
            for decayed, place, shard in _plain_shards(ordered, kind, number, chunks, files):
                stored = files[place].file.add(shard, tensors.shape_of(shard))
                held[place][group_for(decayed, groups[place])][kind].append(stored)
        for place, file in files.items():
            found[place].append(_plain_part(part, groups[place], held[place], file.file))
    return found


def _plain_shards(
    ordered: OrderedState, kind: str, number: int, chunks: list[list[Entry]], files: Mapping[Place, RankFile]
) -> Iterator[tuple[bool, Place, list[Any]]]:
    """Yield (whether a parameter decays, rank, blocks of its state) of one optimizer, in the host's order."""
    for virtual, chunk in enumerate(chunks):
        for entry in ordered.stepped_by(number, chunk):
            holders = [place for place in files if entry.name in ordered.shapes(files[place], virtual)]
            shards = ordered.shards(kind, entry) if holders else []
            for place in holders:
                shard = shards[place[0] % len(shards)]
                yield decays(entry.name, len(tensors.shape_of(shard))), place, shard


def _plain_part(
    part: Mapping[str, Any], groups_here: list[Group], held: list[dict[str, list[StoredTensor]]], file: TorchFile
) -> dict[str, Any]:
    """Return the state of one plain optimizer, its parameters numbered over all groups."""
    old = inner(dict(part))
    steps = [one["step"] for one in old["state"].values() if "step" in one]
    state: dict[int, object] = {}
    groups = []
    for group, kinds in zip(groups_here, held, strict=True):
        numbers = []
        for moments in zip(*(kinds[kind] for kind in MOMENTS), strict=True):
            numbers.append(len(state))
            step = {"step": storable(steps[0], file)} if steps else {}
            state[numbers[-1]] = {**step, **dict(zip(MOMENTS, moments, strict=True))}
        groups.append({**storable(dict(group), file), "params": numbers})
    written = {**storable({k: v for k, v in old.items() if k not in ("state", "param_groups")}, file)}
    written |= {"state": state, "param_groups": groups}
    if old is part or "optimizer" not in part:
        return written
    rest = {name: value for name, value in part.items() if name not in ("optimizer", "fp32_from_fp16_params")}
    masters = {"fp32_from_fp16_params": [kinds["fp32_param"] for kinds in held]} if "fp32_param" in held[0] else {}
    return {**storable(rest, file), **masters, "optimizer": written}


def storable(value: Any, file: TorchFile) -> Any:
    """Return ``value`` with its tensors in ``file``, without what is neither plain nor a tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        return file.add([value.reshape(-1)], value.shape)
    if isinstance(value, dict):
        return {name: storable(one, file) for name, one in value.items() if _is_storable(one)}
    if isinstance(value, (list, tuple)):
        return type(value)(storable(one, file) for one in value)
    return value


def _is_storable(value: object) -> bool:
    import torch

    return value is None or isinstance(value, (bool, int, float, str, list, tuple, dict, torch.Tensor, torch.dtype))
