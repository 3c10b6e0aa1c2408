"""Checks of test_samples.py; prints ``name<tab>ok`` or what went wrong."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import mindspeed_autoparallel  # before megatron

assert mindspeed_autoparallel.__version__

import numpy  # noqa: E402
import torch  # noqa: E402

from mindspeed_autoparallel.data.lengths import read_indexed  # noqa: E402
from mindspeed_autoparallel.data.media import fitting_size, num_audio_tokens, read_media_sizes  # noqa: E402
from mindspeed_autoparallel.data.records import ChatRecords, read_format  # noqa: E402
from mindspeed_autoparallel.errors import ConfigError  # noqa: E402
from reference_vlm.configuration import DataDescription, read_data, read_model  # noqa: E402
from reference_vlm.data.audio import load_audio  # noqa: E402
from reference_vlm.data.batches import MicrobatchStream, StreamOptions, collate  # noqa: E402
from reference_vlm.data.images import cut_patches  # noqa: E402
from reference_vlm.data.rearrange import describe, make_rearrangement  # noqa: E402
from reference_vlm.data.records import read_records  # noqa: E402
from reference_vlm.data.samples import IGNORED, make_sample  # noqa: E402
from reference_vlm.data.tokens import ByteTokenizer  # noqa: E402
from reference_vlm.model.context import pack_boundaries  # noqa: E402
from reference_vlm.model.dropout import token_rows  # noqa: E402
from reference_vlm.model.grid import lay_out_rows  # noqa: E402
from reference_vlm.model.text import multimodal_positions  # noqa: E402
from reference_vlm.model.vlm import put_at_tokens  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "qwen2vl_tiny"
MODEL = read_model(EXAMPLE / "model.json")
DATA = dataclasses.replace(
    read_data(EXAMPLE / "data.json"), folder=EXAMPLE / "data", files=(EXAMPLE / "data" / "pictures.json",)
)
VISION = MODEL.vision
assert VISION is not None
TOKENIZER = ByteTokenizer()
CHECKS: dict[str, Callable[[], None]] = {}


def check(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = function
        return function

    return register


def fails(function: Callable[[], object], *words: str) -> None:
    try:
        function()
    except ConfigError as error:
        for word in words:
            assert word in str(error), f"{word!r} not in {error}"
        return
    raise AssertionError("no ConfigError")


def with_records(records: list[object], model: object = MODEL) -> DataDescription:
    file = Path(tempfile.mkdtemp()) / "set.json"
    file.write_text(json.dumps(records))
    return dataclasses.replace(DATA, files=(file,))


@check("fitting sizes are multiples within the bounds")
def _() -> None:
    for height, width in itertools.product((20, 56, 77, 300, 2000), (28, 100, 640)):
        fitted = fitting_size(height, width, 28, 56 * 56, 112 * 112)
        assert all(side % 28 == 0 for side in fitted)
        assert fitted[0] * fitted[1] <= 112 * 112 or min(fitted) == 28
        assert fitted[0] * fitted[1] >= 56 * 56
    assert fitting_size(70, 90, 28, 0, 10**9) == (56, 84)
    fails(lambda: fitting_size(1, 300, 28, 0, 10**9), "longer than 200 times")


@check("patches equal a slow cut")
def _() -> None:
    pixels = torch.arange(3 * 56 * 84, dtype=torch.float32).view(3, 56, 84)
    patches, grid = cut_patches(pixels, VISION)
    assert grid == (1, 4, 6)
    places = [(2 * i + di, 2 * j + dj) for i in range(2) for j in range(3) for di in range(2) for dj in range(2)]
    for patch, (row, column) in zip(patches, places, strict=True):
        cut = pixels[:, 14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
        assert torch.equal(patch.view(3, 2, 14, 14), torch.stack((cut, cut), dim=1))


@check("windows equal a slow cut")
def _() -> None:
    vision = dataclasses.replace(VISION, window_size=112)
    rows = lay_out_rows([(1, 12, 10), (1, 4, 4)], vision, torch.device("cpu"))
    assert rows.boundaries == [0, 120, 136]
    assert rows.windows is not None and rows.windows[-1] == 136
    assert sorted(rows.order.tolist()) == list(range(136))
    for start, stop in itertools.pairwise(rows.windows):
        groups = {int(row) // 4 for row in rows.order[start:stop]}
        inside = {(group // 5 // 4, group % 5 // 4) for group in groups if group < 30}
        assert len(inside) <= 1
        assert len(groups) * 4 == stop - start
    merged = rows.order.view(-1, 4)[rows.merged_order]
    assert torch.equal(merged.flatten(), torch.arange(136))


@check("labels are the next wanted tokens")
def _() -> None:
    data = with_records([{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}])
    sample = make_sample(read_records(data)[0], MODEL, data, TOKENIZER, 128)
    wanted = [token for token in sample.labels if token != IGNORED]
    assert wanted == [ord("c"), ord("d"), TOKENIZER.turn_end]
    for place, label in enumerate(sample.labels[:-1]):
        assert label in (IGNORED, sample.input_ids[place + 1])


@check("every image has as many tokens as merged patches")
def _() -> None:
    for record in read_records(DATA):
        sample = make_sample(record, MODEL, DATA, TOKENIZER, 128)
        assert sample.input_ids.count(MODEL.image_token_id) * 4 == sum(len(patches) for patches in sample.patches)
        assert len(sample.grids) == len(record.images)


@check("a missing mark names the sample")
def _() -> None:
    bad = {"messages": [{"role": "user", "content": "<image><image>"}], "images": ["picture_0.png"]}
    fails(lambda: read_records(with_records([bad])), "set.json[0]", "2 <image> marks", "1 files")
    fails(lambda: read_records(with_records([{"messages": "x"}])), "set.json[0]", "list 'messages'")


@check("a picture that does not fit names the sample")
def _() -> None:
    record = next(record for record in read_records(DATA) if len(record.images) == 2)
    fails(lambda: make_sample(record, MODEL, DATA, TOKENIZER, 20), record.name, "--seq-length 20")


@check("broken media name the sample")
def _() -> None:
    data = with_records([{"messages": [{"role": "user", "content": "<image>"}], "images": ["nowhere.png"]}])
    fails(lambda: make_sample(read_records(data)[0], MODEL, data, TOKENIZER, 128), "set.json[0]", "nowhere.png")
    data = with_records([{"messages": [{"role": "user", "content": "<audio>"}], "audios": ["tone_0.wav"]}])
    fails(lambda: make_sample(read_records(data)[0], MODEL, data, TOKENIZER, 128), "no audio_encoder")


@check("positions go on after the longer side")
def _() -> None:
    positions = multimodal_positions([1, 2, 9, 9, 9, 9, 9, 9, 3], 9, [(1, 4, 6)], 2)
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[0, 2:8].tolist() == [2] * 6
    assert positions[1, 2:8].tolist() == [2, 2, 2, 3, 3, 3]
    assert positions[2, 2:8].tolist() == [2, 3, 4, 2, 3, 4]
    assert positions[:, 8].tolist() == [5, 5, 5]


@check("a batch without media has a stand-in")
def _() -> None:
    record = next(record for record in read_records(DATA) if not record.images)
    sample = make_sample(record, MODEL, DATA, TOKENIZER, 128)
    batch = collate([sample], MODEL, TOKENIZER.padding, 128)
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert not (batch["input_ids"] == MODEL.image_token_id).any()
    embeddings = torch.randn(128, 1, 8)
    rows = torch.randn(1, 1, 8, requires_grad=True)
    joined = put_at_tokens(embeddings, rows, batch["input_ids"] == MODEL.image_token_id)
    assert torch.equal(joined, embeddings)
    joined.sum().backward()
    assert rows.grad is not None and not rows.grad.any()


@check("ranks together see the same samples as one")
def _() -> None:
    def stream(rank: int, num_ranks: int, start: int = 0) -> MicrobatchStream:
        shuffled = dataclasses.replace(DATA, shuffle=True)
        return MicrobatchStream(
            read_records(DATA),
            MODEL,
            shuffled,
            TOKENIZER,
            StreamOptions(
                size=1,
                rank=rank,
                num_ranks=num_ranks,
                start=start,
                seed=7,
                max_tokens=128,
                pad_to_longest=True,
                multiple=4,
            ),
        )

    alone = [batch["input_ids"] for batch in itertools.islice(iter(stream(0, 1)), 24)]
    together: list[torch.Tensor] = []
    for pair in zip(iter(stream(0, 2)), iter(stream(1, 2)), strict=False):
        together += [batch["input_ids"] for batch in pair]
        if len(together) == 24:
            break
    resumed = [batch["input_ids"] for batch in itertools.islice(iter(stream(0, 1, 8)), 16)]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(alone[8:], resumed, strict=True))
    assert len({tuple(ids.flatten().tolist()) for ids in alone[:11]}) == 11
    assert all(ids.shape[1] % 4 == 0 for ids in alone)


@check("tones have frames and tokens")
def _() -> None:
    loudest = []
    for number in range(3):
        mel = load_audio(EXAMPLE / "data" / f"tone_{number}.wav", 40)
        assert mel.shape == (40, 16 + 8 * number)
        assert bool(mel.isfinite().all())
        loudest.append(int(mel.mean(dim=1).argmax()))
        assert num_audio_tokens(mel.shape[1], 100) == mel.shape[1] // 4
    assert loudest == sorted(set(loudest))


@check("sizes by headers are those of the samples")
def _() -> None:
    model, data = read_model(EXAMPLE / "model_audio.json"), read_data(EXAMPLE / "data_audio.json")
    for name, records in (("data.json", "pictures.json"), ("data_audio.json", "tones.json")):
        file, folder = EXAMPLE / "data" / records, EXAMPLE / "data"
        described = dataclasses.replace(read_format(EXAMPLE / name), folder=folder, files=(file,), tokenizer=None)
        chat = ChatRecords(described, read_media_sizes(EXAMPLE / "model_audio.json"))
        size_of, _ = chat.counting(0.0, 0)
        found = [size_of(name, json.loads(raw)) for name, raw in chat.records.records]
        samples = [
            make_sample(record, model, data, TOKENIZER, 10**6)
            for record in read_records(dataclasses.replace(data, files=(file,), folder=folder))
        ]
        assert [size.tokens for size in found] == [len(sample.input_ids) for sample in samples]
        assert [size.patches for size in found] == [sum(map(len, sample.patches)) for sample in samples]
        assert [size.frames for size in found] == [sum(c.shape[1] for c in sample.clips) for sample in samples]
    for (name, raw), record in zip(
        chat.records.records, read_records(dataclasses.replace(data, files=(file,), folder=folder)), strict=True
    ):
        for size in (10, 20, 30, 40, 60):
            short, _ = chat.counting(0.0, size)
            refused = []
            for attempt in (
                lambda raw=raw, name=name, short=short: short(name, json.loads(raw)),
                lambda record=record, size=size: make_sample(record, model, data, TOKENIZER, size),
            ):
                try:
                    attempt()
                    refused.append(False)
                except ConfigError:
                    refused.append(True)
            assert refused[0] == refused[1], (name, size)


@check("index files of Megatron are read")
def _() -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = Path(tempfile.mkdtemp()) / "set"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    documents = [[3, 4], [5], [1, 1, 7]]
    for lengths in documents:
        builder.add_document(torch.arange(sum(lengths)), lengths)
    builder.finalize(f"{prefix}.idx")
    assert read_indexed(prefix).tolist() == [sum(lengths) for lengths in documents]


@check("a rearranged batch has the samples of its global batch and trains on where it stopped")
def _() -> None:
    records = read_records(DATA)

    def arguments(**changes: object) -> argparse.Namespace:
        values = {"micro_batch_size": 1, "calculate_per_token_loss": False, "global_batch_size": 8, "seq_length": 128}
        return argparse.Namespace(**{**values, "log_interval": 1, "rank": 0, **changes})

    def batches(rank: int, start: int, balanced: bool, **changes: object) -> list[list[int]]:
        given = arguments(**changes)
        made = make_rearrangement(given, MODEL, DATA, TOKENIZER, 2, False) if balanced else None
        stream = MicrobatchStream(
            records,
            MODEL,
            dataclasses.replace(DATA, shuffle=True),
            TOKENIZER,
            StreamOptions(
                size=given.micro_batch_size,
                rank=rank,
                num_ranks=2,
                start=start,
                seed=7,
                max_tokens=128,
                pad_to_longest=False,
                multiple=1,
            ),
            rearrangement=made,
        )
        number = 12 // given.micro_batch_size
        return [row for batch in itertools.islice(iter(stream), number) for row in batch["input_ids"].tolist()]

    plain = [batches(rank, 0, False) for rank in (0, 1)]
    for changes in ({}, {"micro_batch_size": 2, "calculate_per_token_loss": True}):
        moved = [batches(rank, 0, True, **changes) for rank in (0, 1)]
        for first in range(0, 12, 4):
            before = sorted(row for ranks in plain for row in ranks[first : first + 4])
            after = sorted(row for ranks in moved for row in ranks[first : first + 4])
            assert before == after
        assert moved != plain
        # A resume in the middle of an epoch: the third global batch on.
        again = [batches(rank, 16, True, **changes) for rank in (0, 1)]
        assert [rows[:4] for rows in again] == [rows[8:] for rows in moved]
    fails(
        lambda: make_rearrangement(arguments(micro_batch_size=2), MODEL, DATA, TOKENIZER, 2, False),
        "--calculate-per-token",
    )
    fails(lambda: make_rearrangement(arguments(rampup_batch_size=[1]), MODEL, DATA, TOKENIZER, 2, False), "--rampup")


@check("packed texts lie one after another with their own positions and labels")
def _() -> None:
    records = read_records(DATA)
    samples = [make_sample(record, MODEL, DATA, TOKENIZER, 128) for record in records[:3]]
    lengths = [len(sample.input_ids) for sample in samples]
    length = sum(lengths) + 5
    packed, padded = collate(samples, MODEL, 0, length, True), collate(samples, MODEL, 0, 128)
    assert packed["sequence_lengths"].tolist() == lengths
    assert packed["input_ids"].shape == (1, length) and packed["position_ids"].shape == (3, 1, length)
    start = 0
    for row, size in enumerate(lengths):
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert torch.equal(packed[name][..., 0, start : start + size], padded[name][..., row, :size]), name
        start += size
    assert packed["loss_mask"][0, start:].sum() == 0
    assert torch.equal(packed["pixel_values"], padded["pixel_values"])
    assert pack_boundaries(packed["sequence_lengths"], length) == [0, *itertools.accumulate(lengths), length]
    assert pack_boundaries(packed["sequence_lengths"], start) == [0, *itertools.accumulate(lengths)]
    keys = token_rows(torch.tensor([7, 3]), 9, [0, 4, 6, 9])
    apart = token_rows(torch.tensor([7, 3]), 4)
    assert keys[:6, 0].tolist() == [*apart[:, 0].tolist(), *apart[:2, 1].tolist()]
    assert len(set(keys[:, 0].tolist())) == 9


@check("a sample beyond the limit of tokens is named, a batch beyond it is trained")
def _() -> None:
    given = argparse.Namespace(
        micro_batch_size=2, global_batch_size=8, seq_length=128, calculate_per_token_loss=True, log_interval=1, rank=0
    )
    given.pack_samples, given.data_balance_max_tokens = True, 60
    records = read_records(DATA)
    made = make_rearrangement(given, MODEL, DATA, TOKENIZER, 2, False)
    fails(lambda: made.check_fits(records), "tokens and fits nowhere", "--data-balance-max-tokens", "pictures.json[")
    given.data_balance_max_tokens = 100
    made = make_rearrangement(given, MODEL, DATA, TOKENIZER, 2, False)
    made.check_fits(records)
    rows = made.decide(0, records[:8]).samples
    assert sorted(rows.flatten().tolist()) == list(range(8))


@check("packs filled to a length hold any number of samples within it")
def _() -> None:
    given = argparse.Namespace(
        micro_batch_size=2, global_batch_size=8, seq_length=128, calculate_per_token_loss=True, log_interval=1, rank=0
    )
    given.pack_length, given.pack_samples = 60, True
    records = read_records(DATA)
    made = make_rearrangement(given, MODEL, DATA, TOKENIZER, 2, False)
    fails(lambda: made.check_fits(records), "tokens and fits nowhere: --pack-length allows a microbatch 60")
    given.pack_length = 180
    made = make_rearrangement(given, MODEL, DATA, TOKENIZER, 2, False)
    packs = [made.samples(step, rank, lambda rows: records[: len(rows)]) for rank in (0, 1) for step in (0, 1)]
    assert sorted(itertools.chain(*packs)) == list(range(8)) and all(packs)
    lengths = [len(make_sample(record, MODEL, DATA, TOKENIZER, 128).input_ids) for record in records]
    assert max(sum(lengths[number] for number in pack) for pack in packs) <= 180


@check("rearranging makes work even, and says how even")
def _() -> None:
    given = argparse.Namespace(
        micro_batch_size=1, global_batch_size=8, seq_length=128, calculate_per_token_loss=False, log_interval=1, rank=0
    )
    made = make_rearrangement(given, MODEL, DATA, TOKENIZER, 2, False)
    records = read_records(DATA)
    heavy = next(record for record in records if len(record.images) == 2)
    light = next(record for record in records if not record.images)
    decision = made.decide(0, [heavy, light] * 4)
    assert decision.before.imbalance > 1.2 and decision.after.imbalance < 1.01
    assert "above the batch's bound" in describe(0, decision)


@check("put_at_tokens keeps the order of samples")
def _() -> None:
    at = torch.tensor([[False, True, True], [True, False, True]])
    rows = torch.arange(4.0).view(4, 1, 1)
    joined = put_at_tokens(torch.full((3, 2, 1), -1.0), rows, at)
    assert joined[:, :, 0].T.tolist() == [[-1, 0, 1], [2, -1, 3]]


def main() -> None:
    for name, function in CHECKS.items():
        try:
            function()
            print(f"{name}\tok")
        except Exception as error:
            print(f"{name}\t{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
