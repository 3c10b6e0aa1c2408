"""The state of Adam for the rank folders of another layout, written without Megatron.

A plain Adam numbers its parameters by groups, in the order of the model. The distributed optimizer has flat buffers: a
chunk has its parameters from the last to the first, each at a multiple of 64 values in its bucket. Source:
``_compute_per_buffer_param_layout`` of ``distrib_optimizer.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.optimizer_state import ALIGNED, FILE, MOMENTS, PREFIX, aligned
from mindspeed_autoparallel.weights.parameter_groups import Group, decays, group_for, groups_of_rank, inner
from mindspeed_autoparallel.weights.pickles import load_tensors_only
from mindspeed_autoparallel.weights.placement import Entry, has_output_layer
from mindspeed_autoparallel.weights.rank_files import RankFile, chunk_keys
from mindspeed_autoparallel.weights.rank_folders import RankFolderSource
from mindspeed_autoparallel.weights.spelling import EACH, GROUPED, Spelling, forms_of
from mindspeed_autoparallel.weights.state_order import OrderedState, Place
from mindspeed_autoparallel.weights.torch_file import StoredTensor, TorchFile

_OF_TORCH_DIST = ("args", "optimizer", "content_metadata")
"""Keys that are stored elsewhere in a rank's file, or not at all."""


def why_state_stays(weights: RankFolderSource, layout: CheckpointLayout, spelling: Spelling) -> str | None:
    """Return why the optimizer's state of ``weights`` cannot be written for ``layout``; None if it can."""
    architecture = weights.architecture
    shape = architecture.modules[TEXT]
    if not architecture.is_text_only:
        return "encoders have parameters in an order of their own"
    if shape.num_multi_token:
        return "layers for multi-token prediction hold a second embedding"
    file = weights.any_file()
    content = load_tensors_only(file)
    forms = forms_of(name for key in chunk_keys(content, file) for name in content[key])
    if spelling.implementation not in forms:
        return f"its layers list parameters in another order than those of --transformer-impl {spelling.implementation}"
    if not shape.num_experts:
        return None
    if spelling.experts != EACH or GROUPED in forms:
        return "all experts of a rank lie in one tensor"
    if (layout.expert_size > 1) != (weights.expert_size > 1):
        return "experts have an optimizer of their own under expert parallelism alone"
    return None


class StateOfRanks(OrderedState):
    """The optimizer's state, written with the weights."""

    def write_stage(self, stage: int, files: Mapping[Place, RankFile]) -> dict[Place, dict[str, object]]:
        """Write the state of one pipeline stage; return each rank's entries for the file of its weights."""
        chunks = [self.parameters(virtual, stage) for virtual in range(self.layout.virtual_size)]
        if self.state.buffer_key is None:
            optimizers = write_plain(self, chunks, files)
        else:
            write_distributed(self, chunks, files)
            optimizers = {
                place: [self._settings(number, file, chunks) for number in range(len(self.state.parts))]
                for place, file in files.items()
            }
        common = {name: value for name, value in self.state.common.items() if name not in _OF_TORCH_DIST}
        found: dict[Place, dict[str, object]] = {}
        for place, file in files.items():
            parts = optimizers[place]
            found[place] = {
                **storable(common, file.file),
                "args": self._arguments(),
                "optimizer": parts if len(parts) > 1 else parts[0],
            }
        return found

    def _settings(self, number: int, file: RankFile, chunks: list[list[Entry]]) -> dict[str, object]:
        """Return the entries of the distributed optimizer ``number`` in a rank's weights file."""
        part = self.state.parts[number]
        groups = groups_of_rank(part, self.held_by(file, number, chunks))
        held = {**inner(part), "param_groups": [dict(group) for group in groups]}
        written: dict[str, object] = storable(held if inner(part) is part else {**part, "optimizer": held}, file.file)
        return written

    def _arguments(self) -> Namespace:
        """Return the arguments that the training compares with its own, and its position in the data."""
        given = vars(self.state.common["args"])
        return Namespace(
            **{
                **given,
                "ckpt_format": "torch",
                "tensor_model_parallel_size": self.layout.tensor_size,
                "pipeline_model_parallel_size": self.layout.pipeline_size,
                "expert_model_parallel_size": self.layout.expert_size,
            }
        )


def write_plain(
    ordered: OrderedState, chunks: list[list[Entry]], files: Mapping[Place, RankFile]
) -> dict[Place, list[dict[str, object]]]:
    kinds = [kind.removeprefix(PREFIX).removesuffix(".") for kind in ordered.state.sources]
    found: dict[Place, list[dict[str, object]]] = {place: [] for place in files}
    for number, part in enumerate(ordered.state.parts):
        groups = {place: groups_of_rank(part, ordered.held_by(file, number, chunks)) for place, file in files.items()}
        # Rank -> group -> kind -> placeholder of each parameter's state.
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
    """Return ``value`` with its tensors in ``file``, without values that are neither plain nor tensors."""
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


def write_distributed(ordered: OrderedState, chunks: list[list[Entry]], files: Mapping[Place, RankFile]) -> None:
    count = len(ordered.state.parts)
    first_expert = {rank: min(expert for at, expert in files if at == rank) for rank, _ in files}
    # Tensors outside experts are in the file of the first of the ranks that step them together.
    holders = [[(rank, one) for rank, one in files if number or one == first_expert[rank]] for number in range(count)]
    mine = [[ordered.stepped_by(number, chunk) for chunk in chunks] for number in range(count)]
    begins = [
        [
            {place: _begins(ordered, chunk, ordered.shapes(files[place], virtual)) for place in holders[number]}
            for virtual, chunk in enumerate(mine[number])
        ]
        for number in range(count)
    ]
    with ExitStack() as stack:
        opened = {
            place: TorchFile(stack.enter_context((file.path.parent / FILE).open("wb"))) for place, file in files.items()
        }
        content: dict[Place, list[dict[object, object] | None]] = {place: [None] * count for place in files}
        for number in range(count):
            buffers: dict[Place, dict[object, object]] = {
                place: {"buckets_coalesced": True} for place in holders[number]
            }
            for virtual, chunk in enumerate(mine[number]):
                for place, found in _write_buffers(ordered, chunk, begins[number][virtual], opened).items():
                    buffers[place][virtual] = {ordered.state.buffer_key: found}
            for place, held in buffers.items():
                content[place][number] = held
        for place, file in opened.items():
            file.finish(content[place] if count > 1 else content[place][0])


def _begins(
    ordered: OrderedState, chunk: list[Entry], shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[Entry, int, int]]:
    """Return (parameter, first value, end) in the flat buffer of a rank, in its order."""
    import torch

    tied = ordered.weights.architecture.tied_embeddings and has_output_layer(
        ordered.weights.architecture, ordered.layout
    )
    found, bucket, end = [], 0, 0
    for entry in reversed([one for one in chunk if one.name in shapes]):
        begin = aligned(end, bucket)
        end = begin + torch.Size(shapes[entry.name]).numel()
        found.append((entry, begin, end))
        if tied and (names.is_output_layer(entry.rule) or entry.name.endswith(names.EMBEDDING)):
            bucket = end  # Megatron ends a bucket after an embedding that two stages share
    if any(begin % ALIGNED or end % ALIGNED for _, begin, end in found[:-1]):
        _refuse_buckets(ordered)
    return found


def _refuse_buckets(ordered: OrderedState) -> None:
    """Raise ``ConfigError`` if the training's bucket size would move parameters."""
    arguments = vars(ordered.state.common["args"])
    if arguments.get("overlap_grad_reduce") or arguments.get("ddp_num_buckets"):
        raise ConfigError(
            f"a parameter of the new layout has no multiple of {ALIGNED} values, so that its place in the "
            "optimizer's buffer follows the buckets of --overlap-grad-reduce, which depend on the ranks. Give "
            "--format torch_dist, or --weights-only."
        )


def _write_buffers(
    ordered: OrderedState,
    chunk: list[Entry],
    begins: Mapping[Place, list[tuple[Entry, int, int]]],
    files: Mapping[Place, TorchFile],
) -> dict[Place, dict[str, object]]:
    """Write the flat buffers of a chunk, a parameter at a time into the files of all ranks that hold it."""
    import torch

    found: dict[Place, dict[str, object]] = {
        place: {"numel_unpadded": held[-1][2]} for place, held in begins.items() if held
    }
    spans = {place: {entry.name: (begin, end) for entry, begin, end in held} for place, held in begins.items() if held}
    for kind in ("param", *MOMENTS):
        with ExitStack() as stack:
            writes, ends = {}, dict.fromkeys(found, 0)
            for place in found:
                stored, writes[place] = stack.enter_context(
                    files[place].growing(torch.float32, (begins[place][-1][2],))
                )
                found[place][kind] = stored
            for entry in reversed(chunk):
                holders = [place for place in found if entry.name in spans[place]]
                shards = ordered.shards(kind, entry) if holders else []
                for place in holders:
                    begin, end = spans[place][entry.name]
                    writes[place](torch.zeros(begin - ends[place]))
                    for block in shards[place[0] % len(shards)]:
                        writes[place](block.to(torch.float32))
                    ends[place] = end
    return found
