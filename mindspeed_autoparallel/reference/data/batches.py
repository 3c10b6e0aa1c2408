"""Samples -> microbatches: padded text, patches of all images, a stand-in where a microbatch has no image or audio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch

from mindspeed_autoparallel.reference.configuration import DataDescription, ModelDescription
from mindspeed_autoparallel.reference.configuration.data import ITEMS_PER_SAMPLE
from mindspeed_autoparallel.reference.data.rearrange import Rearrangement
from mindspeed_autoparallel.reference.data.records import Record
from mindspeed_autoparallel.reference.data.samples import IGNORED, Sample, make_sample
from mindspeed_autoparallel.reference.data.tokens import Tokenizer

STAND_IN_FRAMES = 4

Batch = dict[str, torch.Tensor]


def identities(numbers: Sequence[int], samples: Sequence[Sample], model: ModelDescription) -> Batch:
    """Return what makes samples, images and clips of a training different from all others: ``sample_numbers [b]``,
    ``image_keys``, ``audio_keys``; dropout is drawn from them."""

    def keys(counts: Sequence[int]) -> torch.Tensor:
        found = [
            number * ITEMS_PER_SAMPLE + 1 + place
            for number, count in zip(numbers, counts, strict=True)
            for place in range(count)
        ]
        # A stand-in where there is none.
        return torch.tensor(found or [0])

    batch = {"sample_numbers": torch.tensor(list(numbers))}
    if model.vision is not None:
        batch["image_keys"] = keys([len(sample.grids) for sample in samples])
    if model.audio is not None:
        batch["audio_keys"] = keys([len(sample.clips) for sample in samples])
    return batch


def collate(samples: Sequence[Sample], model: ModelDescription, padding: int, length: int) -> Batch:
    """Return tensors for the model's forward, and ``loss_mask [b, s]``; texts are padded on the right to ``length``
    tokens."""
    ids = torch.full((len(samples), length), padding, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    positions = torch.arange(length).expand(3, len(samples), length).clone()
    for row, sample in enumerate(samples):
        size = len(sample.input_ids)
        ids[row, :size] = torch.tensor(sample.input_ids)
        labels[row, :size] = torch.tensor(sample.labels)
        positions[:, row, :size] = torch.from_numpy(sample.positions)
    batch = {
        "input_ids": ids,
        "position_ids": positions,
        "labels": labels.clamp(min=0),
        "loss_mask": (labels != IGNORED).float(),
    }
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
        *,
        size: int,
        rank: int,
        num_ranks: int,
        start: int,
        seed: int,
        max_tokens: int,
        pad_to_longest: bool,
        multiple: int,
        with_identities: bool = False,
        rearrangement: Rearrangement | None = None,
    ) -> None:
        self._records, self._model, self._data, self._tokenizer = records, model, data, tokenizer
        self._size, self._rank, self._num_ranks, self._start, self._seed = size, rank, num_ranks, start, seed
        self._max_tokens, self._pad_to_longest, self._multiple = max_tokens, pad_to_longest, multiple
        self._with_identities = with_identities
        self._rearrangement = rearrangement
        self._made: dict[int, Sample] = {}
        self._epoch: tuple[int, list[int]] = (-1, [])

    def __iter__(self) -> Iterator[Batch]:
        step = self._start // (self._size * self._num_ranks)
        while True:
            numbers = self._numbers(step)
            samples = [self._sample(number) for number in numbers]
            batch = collate(samples, self._model, self._tokenizer.padding, self._length(samples))
            yield {**batch, **identities(numbers, samples, self._model)} if self._with_identities else batch
            step += 1

    def _numbers(self, step: int) -> Sequence[int]:
        if self._rearrangement is not None:
            return self._rearrangement.samples(step, self._rank, self._records_of)
        first = (step * self._num_ranks + self._rank) * self._size
        return range(first, first + self._size)

    def _length(self, samples: Sequence[Sample]) -> int:
        if not self._pad_to_longest:
            return self._max_tokens
        longest = max(len(sample.input_ids) for sample in samples)
        return -(-longest // self._multiple) * self._multiple

    def _sample(self, number: int) -> Sample:
        index = self._index(number)
        if index not in self._made:
            # Small sets stay in memory; a large one keeps what fits the last few thousand samples.
            if len(self._made) > 4096:
                self._made.clear()
            self._made[index] = make_sample(
                self._records[index], self._model, self._data, self._tokenizer, self._max_tokens
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
                generator = torch.Generator().manual_seed(self._seed + epoch)
                order = torch.randperm(len(self._records), generator=generator).tolist()
            self._epoch = (epoch, order)
        return self._epoch[1]
