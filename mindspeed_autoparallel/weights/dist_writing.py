"""``torch_dist``, written: layer by layer, so that no stack of layers is ever in memory."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mindspeed_autoparallel.weights import dist_names, tensors
from mindspeed_autoparallel.weights.architecture import TEXT
from mindspeed_autoparallel.weights.dist_metadata import METADATA
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.optimizer_state import OptimizerState
from mindspeed_autoparallel.weights.placement import Entry
from mindspeed_autoparallel.weights.rank_files import CHECKPOINT_VERSION, step_name
from mindspeed_autoparallel.weights.rank_folders import write_tracker
from mindspeed_autoparallel.weights.source import Progress, TensorSource, stored_entries
from mindspeed_autoparallel.weights.spelling import Spelling
from mindspeed_autoparallel.weights.torch_file import TorchFile

DATA_FILE = "__0_0.distcp"


def write_torch_dist(
    source: TensorSource,
    folder: Path,
    layout: CheckpointLayout,
    spelling: Spelling,
    iteration: int | None,
    state: OptimizerState | None,
    progress: Progress,
) -> None:
    """Write ``source`` into the empty ``folder``; holds one tensor in memory. The tracker file is written last.

    ``state``: the optimizer's state, written with the weights.
    """
    import torch
    from torch.distributed.checkpoint import metadata as dcp

    architecture = source.architecture
    target = folder / step_name(iteration)
    target.mkdir()
    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    chunks: dict[str, list[dcp.ChunkStorageMetadata]] = {}
    stored: dict[Any, Any] = {}
    entries = stored_entries(source)
    with (target / DATA_FILE).open("wb") as stream:
        for done, entry in enumerate(entries):
            padded = layout.padded_vocab(architecture.vocab_size)
            stored_as = dist_names.stored_key(entry, architecture, spelling)
            for key, blocks in _keyed_blocks(entry, source, stored_as, padded, state):
                stack = dist_names.stack_of(entry, architecture, spelling)
                own = tensors.shape_of(blocks)
                if key not in described:
                    properties = dcp.TensorProperties(dtype=blocks[0].dtype)
                    chunks[key] = []
                    described[key] = dcp.TensorStorageMetadata(
                        properties, torch.Size((*(size for _, size in stack), *own)), chunks[key]
                    )
                offsets = torch.Size((*(place for place, _ in stack), *[0] * len(own)))
                shape = torch.Size((*[1] * len(stack), *own))
                chunks[key].append(dcp.ChunkStorageMetadata(offsets, shape))
                stored[dcp.MetadataIndex(key, offsets)] = append(stream, blocks, shape)
            extra = dist_names.extra_state(entry, stored_as, architecture, spelling)
            if extra is not None:
                described[extra] = dcp.BytesStorageMetadata()
                stored[dcp.MetadataIndex(extra)] = append(stream, [None])
            progress(done + 1, len(entries), entry.name)
    with (target / METADATA).open("wb") as stream:
        pickle.dump(dcp.Metadata(state_dict_metadata=described, planner_data={}, storage_data=stored), stream)
    _write_common(target, architecture.modules[TEXT].num_layers, iteration, {} if state is None else state.common)
    write_tracker(folder, iteration)


def _keyed_blocks(
    entry: Entry, source: TensorSource, key: str, padded_vocab: int, state: OptimizerState | None
) -> Iterator[tuple[str, list[Any]]]:
    """Yield (key, blocks of rows) of a weight and of the optimizer's state of it."""
    sources: dict[str, TensorSource] = {"": source, **({} if state is None else state.sources)}
    for prefix, one in sources.items():
        if prefix and not one.has(entry):
            continue  # not trained
        (blocks,) = tensors.cut(entry.rule, one.blocks(entry), 1, padded_vocab)
        sections = dist_names.sections_of(entry.rule)
        if not sections:
            yield prefix + key, blocks
        begin = 0
        for end, num_rows in sections:
            yield prefix + key + end, tensors.rows(blocks, begin, begin + num_rows)
            begin += num_rows


def _write_common(target: Path, num_layers: int, iteration: int | None, more: dict[str, object]) -> None:
    import torch

    # Hosts read the parallel sizes of the writer; a converted checkpoint has none, so all are set to 1.
    arguments = argparse.Namespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers=num_layers,
        ckpt_format="torch_dist",
    )
    common = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration or 0, "args": arguments, **more}
    torch.save(common, target / "common.pt")
    described_as = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (target / "metadata.json").write_text(json.dumps(described_as), encoding="utf-8")


def append(stream: IO[bytes], value: Any, shape: Sequence[int] | None = None) -> Any:
    """Write ``value``, a plain value or, with ``shape``, the blocks of a tensor; return its position."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    begin = stream.tell()
    file = TorchFile(stream)
    file.finish(value if shape is None else file.add(value, shape))
    return _StorageInfo(DATA_FILE, begin, stream.tell() - begin)
