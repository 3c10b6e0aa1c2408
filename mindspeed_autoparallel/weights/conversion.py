"""The three conversions: into a layout, back to Hugging Face, from one layout to another."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.architecture import MEGATRON, ROPE_FLAGS, Architecture, read_architecture
from mindspeed_autoparallel.weights.dcp import is_dcp
from mindspeed_autoparallel.weights.dist_writing import write_torch_dist
from mindspeed_autoparallel.weights.folders import refuse_existing, whole_folder
from mindspeed_autoparallel.weights.huggingface import HuggingFaceSource
from mindspeed_autoparallel.weights.huggingface_writing import write_huggingface
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.optimizer_state import OptimizerState, has_state, read_state
from mindspeed_autoparallel.weights.placement import entries_of
from mindspeed_autoparallel.weights.rank_files import iteration_of
from mindspeed_autoparallel.weights.rank_folders import RankFolderSource, iteration_folder
from mindspeed_autoparallel.weights.rank_writing import write_rank_folders
from mindspeed_autoparallel.weights.shard_writer import DEFAULT_SHARD_BYTES
from mindspeed_autoparallel.weights.source import Progress, TensorSource, silent
from mindspeed_autoparallel.weights.spelling import LOCAL, TRANSFORMER_ENGINE, Spelling
from mindspeed_autoparallel.weights.state_writing import StateOfRanks, why_state_stays
from mindspeed_autoparallel.weights.torch_dist import TorchDistSource, copy_torch_dist, is_torch_dist

_LOG = logging.getLogger(__name__)
RANK_FOLDERS = "mm"
TORCH_DIST = "torch_dist"
DCP = "dcp"
FORMATS = (RANK_FOLDERS, TORCH_DIST, DCP)


@dataclass(frozen=True)
class _Rest:
    """State besides the weights with which a training resumes."""

    iteration: int | None = None
    state: OptimizerState | None = None


def huggingface_to_checkpoint(
    hf_folder: Path,
    target: Path,
    layout: CheckpointLayout,
    *,
    checkpoint: Path | None = None,
    file_format: str = RANK_FOLDERS,
    spelling: Spelling | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> None:
    """Write Hugging Face weights as a checkpoint under ``layout`` (``torch_dist`` has no layout: hosts cut it on
    loading), or under Hugging Face names (``dcp``).

    ``checkpoint``: of any layout, from which the weights are read in place of ``hf_folder``, without an optimizer's
    state.
    """
    refuse_existing(target, overwrite=overwrite, sources=(hf_folder, *([checkpoint] if checkpoint else [])))
    source, rest = _open(checkpoint, hf_folder, _host(spelling)), _Rest()
    if checkpoint is None:
        _warn_of_rope_scaling(source.architecture)
    else:
        rest = _Rest(iteration_of(iteration_folder(checkpoint)))
    with whole_folder(target, overwrite=overwrite) as folder:
        _write(source, folder, hf_folder, layout, file_format, spelling, progress, rest)


def checkpoint_to_huggingface(
    checkpoint: Path,
    hf_folder: Path,
    target: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    host: str = MEGATRON,
    overwrite: bool = False,
    progress: Progress = silent,
) -> None:
    """Write a checkpoint of any layout as Hugging Face weights, with config, tokenizer and naming form of
    ``hf_folder``."""
    refuse_existing(target, overwrite=overwrite, sources=(checkpoint, hf_folder))
    source = _open(checkpoint, hf_folder, host)
    with whole_folder(target, overwrite=overwrite) as folder:
        write_huggingface(source, folder, hf_folder, max_shard_bytes=max_shard_bytes, progress=progress)


def resplit(
    checkpoint: Path,
    hf_folder: Path | None,
    target: Path,
    layout: CheckpointLayout | None,
    *,
    file_format: str = RANK_FOLDERS,
    spelling: Spelling | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> bool:
    """Write a checkpoint of any layout in another one. Returns whether optimizer state was converted, too.

    It is from rank folders, unless a warning names the reason against it. From torch_dist to
    torch_dist neither ``hf_folder`` nor ``layout`` is needed: such a checkpoint has no layout.
    """
    refuse_existing(target, overwrite=overwrite, sources=(checkpoint, *([hf_folder] if hf_folder else [])))
    source_folder = iteration_folder(checkpoint)
    if is_whole_copy(checkpoint, file_format):
        with whole_folder(target, overwrite=overwrite) as folder:
            return copy_torch_dist(source_folder, folder, progress)
    if hf_folder is None or layout is None:
        raise ConfigError(
            "resplit needs --hf-dir, the folder with the model's config.json, except from torch_dist to torch_dist."
        )
    source = _open(checkpoint, hf_folder, _host(spelling))
    state = None
    if file_format != DCP and isinstance(source, RankFolderSource) and has_state(source):
        reason = None if file_format == TORCH_DIST else why_state_stays(source, layout, spelling or Spelling(LOCAL))
        if reason is None:
            source, state = _with_state(source, layout)
        else:
            _LOG.warning("weights only: %s. --format torch_dist takes the optimizer's state along.", reason)
    with whole_folder(target, overwrite=overwrite) as folder:
        rest = _Rest(iteration_of(source_folder), state)
        _write(source, folder, hf_folder, layout, file_format, spelling, progress, rest)
    return state is not None


def _with_state(weights: RankFolderSource, layout: CheckpointLayout) -> tuple[RankFolderSource, OptimizerState]:
    """Return the reader of weights, padding rows included, and that of the optimizer's state of the same checkpoint."""
    source = RankFolderSource(weights.folder, weights.architecture, keeps_padding=True)
    embedding = next(entry for entry in entries_of(weights.architecture) if entry.name.endswith(names.EMBEDDING))
    rows, wanted = source.load(embedding).shape[0], layout.padded_vocab(weights.architecture.vocab_size)
    if layout.vocab_multiple is not None and rows != wanted:
        raise ConfigError(
            f"{weights.folder}: the optimizer's state is of {rows} rows of the vocabulary, the new layout pads it to "
            f"{wanted}. Choose --make-vocab-size-divisible-by so that {rows} remain, or --weights-only."
        )
    return source, read_state(source)


def is_whole_copy(checkpoint: Path, file_format: str) -> bool:
    """Return whether a resplit of ``checkpoint`` into ``file_format`` only copies it: from torch_dist to torch_dist."""
    return file_format == TORCH_DIST and is_torch_dist(iteration_folder(checkpoint))


def _open(checkpoint: Path | None, hf_folder: Path, host: str) -> TensorSource:
    """Return the reader for the format of ``checkpoint``, a training of the model in ``hf_folder``; None: that folder's
    own."""
    if checkpoint is None or is_dcp(checkpoint):
        return HuggingFaceSource(hf_folder, host, checkpoint)
    reader = TorchDistSource if is_torch_dist(iteration_folder(checkpoint)) else RankFolderSource
    return reader(checkpoint, read_architecture(hf_folder, host))


def _host(spelling: Spelling | None) -> str:
    return MEGATRON if spelling is None else spelling.host


def _write(
    source: TensorSource,
    folder: Path,
    original: Path,
    layout: CheckpointLayout,
    file_format: str,
    spelling: Spelling | None,
    progress: Progress,
    rest: _Rest,
) -> None:
    """Write ``source`` into the empty ``folder``; ``dcp`` has the names of the Hugging Face model ``original``."""
    if file_format not in FORMATS:
        raise ConfigError(f"unknown checkpoint format {file_format!r}. Known: {', '.join(FORMATS)}.")
    if file_format == DCP:
        write_huggingface(source, folder, original, as_dcp=True, progress=progress)
        return
    _warn_of_padding(layout, source.architecture)
    if file_format == TORCH_DIST:
        spelling = spelling or Spelling(TRANSFORMER_ENGINE)
        write_torch_dist(source, folder, layout, spelling, rest.iteration, rest.state, progress)
        return
    spelling, state = spelling or Spelling(LOCAL), None
    if rest.state is not None and isinstance(source, RankFolderSource):
        state = StateOfRanks(source, rest.state, layout, spelling)
    write_rank_folders(source, folder, layout, spelling, rest.iteration, state, progress)


def _warn_of_rope_scaling(architecture: Architecture) -> None:
    """Warn if the host needs flags for the position encoding, which no checkpoint contains."""
    if architecture.rope_scaling:
        _LOG.warning(
            "config.json scales positions (%s): give the host its flags for it (%s), or it trains with other positions "
            "than the weights were made with.",
            architecture.rope_scaling,
            ROPE_FLAGS.get(architecture.rope_scaling, "Megatron has none of this kind"),
        )


def _warn_of_padding(layout: CheckpointLayout, architecture: Architecture) -> None:
    num_rows = layout.padded_vocab(architecture.vocab_size) - architecture.vocab_size
    if num_rows:
        _LOG.warning(
            "%d rows of zeros pad the vocabulary of %d: Megatron's softmax counts them, so that the first losses lie a "
            "little above those of Hugging Face.",
            num_rows,
            architecture.vocab_size,
        )
