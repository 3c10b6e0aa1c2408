"""The flat buffers of Megatron's distributed optimizer, written for another layout.

A chunk has its parameters from the last to the first, each at a multiple of 64 values in its bucket. Source:
``_compute_per_buffer_param_layout`` of ``distrib_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.flat_buffers import ALIGNED, aligned
from mindspeed_autoparallel.weights.optimizer_state import FILE, MOMENTS
from mindspeed_autoparallel.weights.placement import Entry, has_output_layer
from mindspeed_autoparallel.weights.state_order import OrderedState, Place, RankFile
from mindspeed_autoparallel.weights.torch_file import TorchFile


def write_distributed(ordered: OrderedState, chunks: list[list[Entry]], files: Mapping[Place, RankFile]) -> None:
    count = len(ordered.state.parts)
    first_expert = {rank: min(expert for at, expert in files if at == rank) for rank, _ in files}
    # What is no expert's lies in the file of the first of the ranks that step it together.
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
            bucket = end  # Megatron ends a bucket behind an embedding that two stages share
    if any(begin % ALIGNED or end % ALIGNED for _, begin, end in found[:-1]):
        _refuse_buckets(ordered)
    return found


def _refuse_buckets(ordered: OrderedState) -> None:
    """Raise ``ConfigError`` where the size of buckets, which the training chooses, would move parameters."""
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
