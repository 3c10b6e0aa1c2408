"""Rank folders, written: one pipeline stage after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.weights import memory, names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.placement import Entry, chunk_entries
from mindspeed_autoparallel.weights.rank_files import CHECKPOINT_VERSION, FILE, rank_folder, step_name
from mindspeed_autoparallel.weights.rank_folders import write_tracker
from mindspeed_autoparallel.weights.source import (
    Progress,
    TensorSource,
    blocks_of_output_layer_or_embedding,
    present_entries,
)
from mindspeed_autoparallel.weights.spelling import EACH, Spelling, grouped_name
from mindspeed_autoparallel.weights.state_writing import StateOfRanks
from mindspeed_autoparallel.weights.torch_file import TorchFile

if TYPE_CHECKING:
    import torch


class _RankFile:
    """One rank's file. ``states``: key (``model``, ``model0``, ...) -> name -> placeholder of the tensor. ``shapes``:
    the same by canonical name."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True)
        self.path = path
        self._stream = path.open("wb")
        self.file = TorchFile(self._stream)
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._waiting: dict[str, torch.Tensor] = {}
        self.states: dict[str, dict[str, object]] = {}

    def add(self, key: str, name: str, blocks: Sequence[Any]) -> None:
        self.states[key][name] = self.file.add(blocks, tensors.shape_of(blocks))

    def add_grouped(self, key: str, local: str, blocks: Sequence[Any], per_rank: int) -> bool:
        """Put an expert's weight into the tensor of all experts of a rank; False for any other weight."""
        grouped = grouped_name(local)
        if grouped is None:
            return False
        name, index = grouped
        num_rows, num_columns = tensors.shape_of(blocks)
        if name not in self._waiting:
            self._waiting[name] = memory.empty((per_rank, num_columns, num_rows), blocks[0].dtype)
        begin = 0
        for block in blocks:
            self._waiting[name][index][:, begin : begin + len(block)].copy_(block.t())
            begin += len(block)
        if index == per_rank - 1:
            # The shape is Megatron's; the memory is that of [expert, in, out].
            stack = self._waiting.pop(name)
            flat = stack.view(stack.shape[1], -1) if name.endswith("1") else stack.view(-1, stack.shape[2])
            self.add(key, name, [flat])
        return True

    def finish(self, iteration: int | None, state: dict[str, object]) -> None:
        self.file.finish(
            {"checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration or 0, **state, **self.states}
        )
        self._stream.close()


def write_rank_folders(
    source: TensorSource,
    folder: Path,
    layout: CheckpointLayout,
    spelling: Spelling,
    iteration: int | None,
    state: StateOfRanks | None,
    progress: Progress,
) -> None:
    """Write ``source`` into the empty ``folder`` under ``layout``; ``iteration`` None makes a ``release`` checkpoint.

    ``state``: the optimizer's state, written with the weights. Holds one tensor in memory, and its shards. The tracker
    file is written last.
    """
    name = step_name(iteration)
    present = {entry.name for entry in present_entries(source)}
    done = 0

    def count(stage: int) -> None:
        nonlocal done
        done += 1
        progress(min(done, len(present)), len(present), f"{name} stage {stage}")

    for stage in range(layout.pipeline_size):
        sizes = layout.pipeline_size, layout.expert_size
        files = {
            (rank, expert): _RankFile(folder / name / rank_folder(rank, stage, expert, *sizes) / FILE)
            for rank, expert in layout.rank_files()
        }
        for virtual in range(layout.virtual_size):
            chunk = chunk_entries(source.architecture, layout, virtual, stage)
            held = list(chunk) if state is None else state.in_order(chunk)
            chunk_of = (layout.chunk_key(virtual), held)
            _write_chunk(source, layout, chunk_of, files, present, spelling, functools.partial(count, stage))
        rest = {} if state is None else state.write_stage(stage, files)
        for place, file in files.items():
            file.finish(iteration, rest.get(place, {}))
    write_tracker(folder, iteration)


def _write_chunk(
    source: TensorSource,
    layout: CheckpointLayout,
    chunk: tuple[str, list[tuple[Entry, int]]],
    files: dict[tuple[int, int], _RankFile],
    present: Collection[str],
    spelling: Spelling,
    count: Callable[[], None],
) -> None:
    """Write the tensors of one virtual chunk of one stage, ``chunk``, into the files of its ranks under its key."""
    architecture = source.architecture
    per_rank = architecture.modules[TEXT].num_experts // layout.expert_size
    key, held = chunk
    for file in files.values():
        file.states[key], file.shapes[key] = {}, {}
    for entry, start in held:
        tied = names.is_output_layer(entry.rule) and architecture.tied_embeddings
        if entry.name not in present and not tied:
            continue
        size = layout.size_of(entry.rule)
        blocks = blocks_of_output_layer_or_embedding(source, entry)
        shards = tensors.cut(entry.rule, blocks, size, layout.padded_vocab(architecture.vocab_size))
        del blocks
        layer_words = architecture.modules[entry.rule.module].layer_words
        words = layer_words[entry.layer if entry.rule.place == names.LAYER else -1]
        for (rank, expert), file in files.items():
            if entry.rule.per_expert and expert != entry.expert // per_rank:
                continue
            local = entry.local_name(start, expert * per_rank)
            shard = shards[rank % size]
            file.shapes[key][entry.name] = tensors.shape_of(shard)
            if spelling.experts == EACH or not file.add_grouped(key, local, shard, per_rank):
                file.add(key, spelling.stored(local, entry.rule, words), shard)
        count()
