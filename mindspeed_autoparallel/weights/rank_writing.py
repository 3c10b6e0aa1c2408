"""Rank folders, written: one pipeline stage after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path

from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.placement import Entry, chunk_entries
from mindspeed_autoparallel.weights.rank_files import FILE, RankFile, rank_folder, step_name
from mindspeed_autoparallel.weights.rank_folders import write_tracker
from mindspeed_autoparallel.weights.source import (
    Progress,
    TensorSource,
    blocks_of_output_layer_or_embedding,
    present_entries,
)
from mindspeed_autoparallel.weights.spelling import EACH, Spelling
from mindspeed_autoparallel.weights.state_writing import StateOfRanks


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
            (rank, expert): RankFile(folder / name / rank_folder(rank, stage, expert, *sizes) / FILE)
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
    files: dict[tuple[int, int], RankFile],
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
