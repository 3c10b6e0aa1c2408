"""Read a data set once, or a random part of it, and return the distribution of its samples' sizes."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.latents import KINDS as VIDEO_KINDS
from mindspeed_autoparallel.data.latents import LeftOut, VideoRecords, kind_of, read_latent_sizes
from mindspeed_autoparallel.data.lengths import read_indexed, read_lengths
from mindspeed_autoparallel.data.media import MediaSizes, read_media_sizes
from mindspeed_autoparallel.data.records import RecordSet, RecordSizes, read_format, read_record_set
from mindspeed_autoparallel.data.sizes import SampleSizes, text_counter
from mindspeed_autoparallel.data.tables import digest_of, read_rows, size_of_row, table_files
from mindspeed_autoparallel.data.tiles import KIND as TILED_KIND
from mindspeed_autoparallel.data.tiles import TiledRecords
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError

Progress = Callable[[str], None]
_EVERY_S = 5.0
_NUM_READERS, _AT_ONCE = 8, 4096
"""Threads that read the headers of files, and records per batch for them."""
_PIXELS = (56 * 56, 28 * 28 * 1280)
"""Least and most pixels of a picture by default: those of Qwen2-VL."""
VERSION = 1
"""Version of the size computation: part of the fingerprint."""


@dataclass(frozen=True, kw_only=True)
class DescribeOptions:
    """How to read. ``max_read`` 0: every record."""

    max_read: int = 0
    seed: int = 0
    seq_length: int = 0
    """Length at which training cuts texts; 0: none, and a text beyond the model's length is an error."""
    bytes_per_token: float = 0.0
    """Above 0: estimate tokens of text from its UTF-8 bytes instead of counting them."""
    skip_broken: bool = False

    def __post_init__(self) -> None:
        for name in ("max_read", "seq_length"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}.")
        if not (math.isfinite(self.bytes_per_token) and self.bytes_per_token >= 0):
            raise ConfigError(f"--bytes-per-token must be above 0, got {self.bytes_per_token:g}.")


def describe_records(
    data_file: Path, model_file: Path, options: DescribeOptions, known: Distribution | None, progress: Progress
) -> tuple[Distribution, tuple[str, ...]]:
    """Return the distribution of the records of data.json, and the errors of skipped records.

    ``known``: an earlier result, returned if nothing has changed. Raises ``ConfigError`` for the first broken record
    (unless ``skip_broken``) and for samples that the model cannot take.
    """
    model = read_media_sizes(model_file)
    _check_length(options, model, model_file)
    kind = kind_of(data_file)
    if kind in VIDEO_KINDS:
        data = _video_data(data_file, model_file, options)
    else:
        data = _tiled(data_file) if kind == TILED_KIND else _chat(data_file, model)
    records = data.records
    fingerprint = _fingerprint(records.sha256, *data.settings, repr(model), repr(options), len(records.records))
    if known is not None and known.source.fingerprint == fingerprint:
        return known, ()
    size_of, tokens_by = data.open(options)
    chosen = _chosen(len(records.records), options)
    found, broken = _read(size_of, (records.records[index] for index in chosen), options, len(chosen), progress)
    source = DataSource(
        kind="records",
        files=tuple(map(str, data.files)),
        sha256=records.sha256,
        tokens_by=tokens_by,
        num_records=len(records.records),
        num_read=len(chosen),
        num_broken=len(broken),
        fingerprint=fingerprint,
    )
    return _distribution(source, found, options, model, model_file), tuple(broken)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Records of one data.json, not yet decoded."""

    files: tuple[Path, ...]
    records: RecordSet
    settings: Sequence[object]
    """The values of data.json that affect sizes."""
    open: Callable[[DescribeOptions], tuple[Callable[[str, bytes], SampleSize], str]]
    """Return the function for the size of a record, and a description of the token count."""


def _chat(data_file: Path, model: MediaSizes) -> _Data:
    data = read_format(data_file)

    def opened(options: DescribeOptions) -> tuple[Callable[[str, bytes], SampleSize], str]:
        count, tokens_by = text_counter(data.tokenizer, options.bytes_per_token)
        return RecordSizes(data, model, count, options.seq_length).size_of, tokens_by

    settings = [data.min_pixels, data.max_pixels, data.tokenizer, str(data.folder)]
    return _Data(files=data.files, records=read_record_set(data), settings=settings, open=opened)


def _video_data(data_file: Path, model_file: Path, options: DescribeOptions) -> _Data:
    if options.bytes_per_token or options.seq_length:
        raise ConfigError("--bytes-per-token and --seq-length have no effect on rows of latents; remove them.")
    sizes = read_latent_sizes(model_file)
    data = VideoRecords(data_file, sizes)
    settings = [repr(sizes), data.settings]
    return _Data(files=data.files, records=data.records, settings=settings, open=lambda _: (data.size_of, "latents"))


def _tiled(data_file: Path) -> _Data:
    data = TiledRecords(data_file)

    def opened(options: DescribeOptions) -> tuple[Callable[[str, bytes], SampleSize], str]:
        count, tokens_by = text_counter(data.tokenizer, options.bytes_per_token)
        return (lambda name, raw: data.size_of(name, raw, count, options.seq_length)), tokens_by

    return _Data(files=data.files, records=data.records, settings=[data.settings], open=opened)


def describe_lengths(
    file: Path,
    kind: Literal["lengths", "indexed"],
    options: DescribeOptions,
    known: Distribution | None,
    model_file: Path | None = None,
) -> Distribution:
    """Return the distribution of a list of lengths, or of the documents of a Megatron data set."""
    model = read_media_sizes(model_file) if model_file is not None else MediaSizes()
    _check_length(options, model, model_file)
    lengths = read_lengths(file) if kind == "lengths" else read_indexed(file)
    if not len(lengths):
        raise ConfigError(f"{file} has no documents with tokens.")
    digest = hashlib.sha256(lengths.tobytes()).hexdigest()
    fingerprint = _fingerprint(digest, kind, repr(options), model.max_tokens)
    if known is not None and known.source.fingerprint == fingerprint:
        return known
    chosen = _chosen(len(lengths), options)
    found = [(f"{file}[{index}]", SampleSize(tokens=int(lengths[index]))) for index in chosen]
    source = DataSource(
        kind=kind,
        files=(str(file),),
        sha256=digest,
        tokens_by="given",
        num_records=len(lengths),
        num_read=len(chosen),
        fingerprint=fingerprint,
    )
    return _distribution(source, found, options, model, model_file)


def describe_table(
    path: Path,
    options: DescribeOptions,
    known: Distribution | None,
    model_file: Path | None = None,
    tokenizer: str | None = None,
) -> tuple[Distribution, tuple[str, ...]]:
    """Return the distribution of the rows of a table, a folder of tables or WebDataset tars (``tables``), and what was
    wrong with rows left out. ``tokenizer``: folder of the tokenizer for texts; without it bytes are counted."""
    model = read_media_sizes(model_file) if model_file is not None else MediaSizes()
    _check_length(options, model, model_file)
    files = table_files(path)
    digest = digest_of(files)
    fingerprint = _fingerprint(digest, "table", tokenizer, repr(model), repr(options))
    if known is not None and known.source.fingerprint == fingerprint:
        return known, ()
    count, tokens_by = text_counter(tokenizer, options.bytes_per_token)
    sizes = SampleSizes(model, _PIXELS, count, options.seq_length)
    number = sum(1 for file in files for _ in read_rows(file)) if options.max_read else 0
    chosen = set(_chosen(number, options)) if options.max_read else None
    found, broken, num_rows, num_read = [], [], 0, 0
    for name, row in (each for file in files for each in read_rows(file)):
        num_rows += 1
        if chosen is not None and num_rows - 1 not in chosen:
            continue
        num_read += 1
        try:
            found.append((name, size_of_row(name, row, sizes)))
        except ConfigError as error:
            if not options.skip_broken:
                raise ConfigError(f"{error} Fix the row, or skip broken ones with --skip-broken.") from error
            broken.append(str(error))
    if not found:
        raise ConfigError(f"{path} has no usable rows; {broken[0] if broken else 'it is empty'}.")
    source = DataSource(
        kind="table",
        files=tuple(map(str, files)),
        sha256=digest,
        tokens_by=tokens_by,
        num_records=num_rows,
        num_read=num_read,
        num_broken=len(broken),
        fingerprint=fingerprint,
    )
    return _distribution(source, found, options, model, model_file), tuple(broken)


def _fingerprint(*parts: object) -> str:
    return hashlib.sha256(json.dumps([VERSION, *map(str, parts)]).encode()).hexdigest()


def _chosen(num_records: int, options: DescribeOptions) -> list[int]:
    """Return the records to read: all, or a sample without replacement, in the order of the data."""
    if not options.max_read or num_records <= options.max_read:
        return list(range(num_records))
    return sorted(random.Random(options.seed).sample(range(num_records), options.max_read))


def _read(
    size_of: Callable[[str, bytes], SampleSize],
    records: Iterator[tuple[str, bytes]],
    options: DescribeOptions,
    number: int,
    progress: Progress,
) -> tuple[list[tuple[str, SampleSize]], list[str]]:
    """Return samples by name, and records that were broken."""
    found, broken, reported = [], [], time.monotonic()

    def read(record: tuple[str, bytes]) -> tuple[str, SampleSize] | ConfigError:
        try:
            return record[0], size_of(*record)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        while part := list(islice(records, _AT_ONCE)):
            for one in pool.map(read, part):
                if not isinstance(one, ConfigError):
                    found.append(one)
                elif options.skip_broken or isinstance(one, LeftOut):
                    broken.append(str(one))
                else:
                    raise ConfigError(f"{one} Fix the record, or skip broken ones with --skip-broken.")
            if time.monotonic() - reported > _EVERY_S:
                reported = time.monotonic()
                progress(f"{len(found) + len(broken)} of {number} records read, {len(broken)} broken")
    if not found:
        raise ConfigError(f"all {number} records are broken or skipped; the first: {broken[0]}")
    return found, broken


def _check_length(options: DescribeOptions, model: MediaSizes, model_file: Path | None) -> None:
    if model.max_tokens and options.seq_length > model.max_tokens:
        raise ConfigError(
            f"--seq-length {options.seq_length} is above max_position_embeddings {model.max_tokens} of {model_file}."
        )


def _distribution(
    source: DataSource,
    found: list[tuple[str, SampleSize]],
    options: DescribeOptions,
    model: MediaSizes,
    model_file: Path | None,
) -> Distribution:
    """Return the distribution of the samples as trained: texts are cut at ``--seq-length``."""
    limit = options.seq_length or model.max_tokens
    longest, longest_size = max(found, key=lambda item: item[1].tokens)
    num_longer = sum(size.tokens > limit for _, size in found) if limit else 0
    if num_longer and not options.seq_length:
        raise ConfigError(
            f"{num_longer} of {len(found)} samples are longer than max_position_embeddings {limit} of {model_file}; "
            f"the longest, {longest}, has {longest_size.tokens} tokens. Give the training's --seq-length, at which "
            "texts are cut."
        )
    source = replace(
        source, num_cut=num_longer, longest_tokens=options.seq_length, seed=options.seed, longest_record=longest
    )
    return make_distribution(
        source, [size._replace(tokens=min(size.tokens, limit or size.tokens)) for _, size in found]
    )
