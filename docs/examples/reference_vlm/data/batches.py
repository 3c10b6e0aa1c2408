"""Samples -> microbatches: padded or packed text, patches of all images, a stand-in if there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch

from reference_vlm.configuration import DataDescription, ModelDescription
from reference_vlm.configuration.data import ITEMS_PER_SAMPLE
from reference_vlm.data.rearrange import Rearrangement
from reference_vlm.data.records import Record
from reference_vlm.data.samples import IGNORED, Sample, make_sample
from reference_vlm.data.tokens import Tokenizer

STAND_IN_FRAMES = 4

Batch = dict[str, torch.Tensor]


def identities(numbers: Sequence[int], samples: Sequence[Sample], model: ModelDescription) -> Batch:
    """Return unique keys of the samples, images and clips of a training: ``sample_numbers [b]``,
    ``image_keys``, ``audio_keys``; dropout is drawn from them."""

    def keys(counts: Sequence[int]) -> torch.Tensor:
        found = [
            number * ITEMS_PER_SAMPLE + 1 + place
            for number, count in zip(numbers, counts, strict=True)
            for place in range(count)
        ]
        # A stand-in if there is none.
        return torch.tensor(found or [0])

    batch = {"sample_numbers": torch.tensor(list(numbers))}
    if model.vision is not None:
        batch["image_keys"] = keys([len(sample.grids) for sample in samples])
    if model.audio is not None:
        batch["audio_keys"] = keys([len(sample.clips) for sample in samples])
    return batch


def collate(
    samples: Sequence[Sample], model: ModelDescription, padding: int, length: int, is_packed: bool = False
) -> Batch:
    """Return tensors for the model's forward, and ``loss_mask [b, s]``; texts are padded on the right to ``length``
    tokens.

    ``is_packed``: texts lie one after another in one row, ``b`` is 1, and ``sequence_lengths [samples]`` has their
    lengths; the row is padded to ``length``.
    """
    num_rows = 1 if is_packed else len(samples)
    ids = torch.full((num_rows, length), padding, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    positions = torch.arange(length).expand(3, num_rows, length).clone()
    start = 0
    for index, sample in enumerate(samples):
        row, stop = 0 if is_packed else index, start + len(sample.input_ids)
        ids[row, start:stop] = torch.tensor(sample.input_ids)
        labels[row, start:stop] = torch.tensor(sample.labels)
        positions[:, row, start:stop] = torch.from_numpy(sample.positions)
        start = stop if is_packed else 0
    batch = {
        "input_ids": ids,
        "position_ids": positions,
        "labels": labels.clamp(min=0),
        "loss_mask": (labels != IGNORED).float(),
    }
    if is_packed:
        batch["sequence_lengths"] = torch.tensor([len(sample.input_ids) for sample in samples])
    if model.vision is not None:
        vision, patches = model.vision, [patch for sample in samples for patch in sample.patches]
        grids = [grid for sample in samples for grid in sample.grids]
        if not grids:
            grids = [(1, vision.spatial_merge_size, vision.spatial_merge_size)]
            features = vision.num_channels * vision.temporal_patch_size * vision.patch_size**2
            patches = [numpy.zeros((vision.spatial_merge_size**2, features), numpy.float32)]
        batch["pixel_values"] = torch.from_numpy(numpy.concatenate(patches))
        batch["image_grid_thw"] = torch.tensor(grids)
    if model.audio is not None:
        clips = [clip for sample in samples for clip in sample.clips]
        clips = clips or [numpy.zeros((model.audio.num_mel_bins, STAND_IN_FRAMES), numpy.float32)]
        batch["audio_features"] = torch.from_numpy(numpy.concatenate(clips, axis=1))
        batch["audio_num_frames"] = torch.tensor([clip.shape[1] for clip in clips])
    return batch


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The samples of a rank, and the lengths of their texts."""

    size: int
    """Number of samples of a microbatch."""
    rank: int
    """Rank among the ``num_ranks`` data-parallel ranks."""
    num_ranks: int
    start: int
    """Number of samples consumed before."""
    seed: int
    max_tokens: int
    pad_to_longest: bool
    """Pad to the longest text of a microbatch, rounded up to a ``multiple``; else to ``max_tokens``."""
    multiple: int
    with_identities: bool = False
    is_packed: bool = False
    """The texts of a microbatch are one row, padded to a ``multiple`` only."""


class MicrobatchStream:
    """Endless microbatches of one data-parallel rank; the same samples per global batch under every layout.

    Global sample ``n`` is record ``n`` of the shuffled epoch; step ``m`` gives rank ``r`` the samples
    ``(m * ranks + r) * size`` and on; with a ``rearrangement`` the samples of every global batch change places.
    """

    def __init__(
        self,
        records: Sequence[Record],
        model: ModelDescription,
        data: DataDescription,
        tokenizer: Tokenizer,
        options: StreamOptions,
        rearrangement: Rearrangement | None = None,
    ) -> None:
        self._records, self._model, self._data, self._tokenizer = records, model, data, tokenizer
        self._options = options
        self._rearrangement = rearrangement
        self._made: dict[int, Sample] = {}
        self._epoch: tuple[int, list[int]] = (-1, [])

    def __iter__(self) -> Iterator[Batch]:
        step = self._options.start // (self._options.size * self._options.num_ranks)
        while True:
            # The reader holds the only reference: a name for it here would keep it until the next one is made.
            yield self._batch(self._numbers(step))
            step += 1

    def _batch(self, numbers: Sequence[int]) -> Batch:
        samples = [self._sample(number) for number in numbers]
        length, is_packed = self._length(samples), self._options.is_packed
        batch = collate(samples, self._model, self._tokenizer.padding, length, is_packed)
        return {**batch, **identities(numbers, samples, self._model)} if self._options.with_identities else batch

    def _numbers(self, step: int) -> Sequence[int]:
        if self._rearrangement is not None:
            return self._rearrangement.samples(step, self._options.rank, self._records_of)
        size = self._options.size
        first = (step * self._options.num_ranks + self._options.rank) * size
        return range(first, first + size)

    def _length(self, samples: Sequence[Sample]) -> int:
        lengths = [len(sample.input_ids) for sample in samples]
        if not self._options.pad_to_longest and not self._options.is_packed:
            return self._options.max_tokens
        needed = sum(lengths) if self._options.is_packed else max(lengths)
        return -(-needed // self._options.multiple) * self._options.multiple

    def _sample(self, number: int) -> Sample:
        index = self._index(number)
        if index not in self._made:
            # Small sets stay in memory; for a large one the last few thousand samples are kept.
            if len(self._made) > 4096:
                self._made.clear()
            self._made[index] = make_sample(
                self._records[index], self._model, self._data, self._tokenizer, self._options.max_tokens
            )
        return self._made[index]

    def _records_of(self, numbers: range) -> list[Record]:
        return [self._records[self._index(number)] for number in numbers]

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self._records))
        return self._order(epoch)[place]

    def _order(self, epoch: int) -> list[int]:
        if self._epoch[0] != epoch:
            order = list(range(len(self._records)))
            if self._data.shuffle:
                generator = torch.Generator().manual_seed(self._options.seed + epoch)
                order = torch.randperm(len(self._records), generator=generator).tolist()
            self._epoch = (epoch, order)
        return self._epoch[1]
