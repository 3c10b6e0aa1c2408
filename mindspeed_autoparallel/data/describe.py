"""Read a data set once, or a random part of it, and return the distribution of its samples' sizes."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.latents import KINDS as VIDEO_KINDS
from mindspeed_autoparallel.data.latents import LeftOut, VideoRecords, kind_of, read_latent_sizes
from mindspeed_autoparallel.data.lengths import read_indexed, read_lengths
from mindspeed_autoparallel.data.media import MediaSizes, read_media_sizes
from mindspeed_autoparallel.data.records import ChatRecords, read_format
from mindspeed_autoparallel.data.sizes import SampleSizes, text_counter
from mindspeed_autoparallel.data.tables import Row, digest_of, read_rows, size_of_row, table_files
from mindspeed_autoparallel.data.tiles import KIND as TILED_KIND
from mindspeed_autoparallel.data.tiles import TiledRecords
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.files import shown

Progress = Callable[[str], None]
_EVERY_S = 5.0
_NUM_READERS, _AT_ONCE = 8, 256
"""Threads that read the headers of files, and records per batch for them: rows may hold pictures."""
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
                raise ConfigError(f"{flag_of(name)} must not be negative, got {getattr(self, name)}.")
        if not (math.isfinite(self.bytes_per_token) and self.bytes_per_token >= 0):
            raise ConfigError(f"--bytes-per-token must be above 0, got {self.bytes_per_token:g}.")


Named = tuple[str, SampleSize]
Measured = tuple[list[Named], list[str], str, int]
"""Samples by name, what was wrong with records left out, a description of the token count, the number of records."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads data sets for the distribution of their samples' sizes, and returns it with the errors of skipped records.

    ``known``: an earlier result, returned if nothing has changed. All methods raise ``ConfigError`` for the first
    broken record (unless ``skip_broken``) and for samples that the model of ``model_file`` cannot take.
    """

    options: DescribeOptions
    model_file: Path | None = None
    known: Distribution | None = None
    progress: Progress = lambda _: None

    @functools.cached_property
    def model(self) -> MediaSizes:
        """Return the sizes in ``model_file``, checked against ``--seq-length``."""
        model = read_media_sizes(self.model_file) if self.model_file is not None else MediaSizes()
        if model.max_tokens and self.options.seq_length > model.max_tokens:
            raise ConfigError(
                f"--seq-length {self.options.seq_length} is above max_position_embeddings {model.max_tokens} of "
                f"{self.model_file}."
            )
        return model

    def records(self, data_file: Path) -> tuple[Distribution, tuple[str, ...]]:
        """Read the records of a data.json of MindSpeed-MM."""
        options, model, kind = self.options, self.model, kind_of(data_file)
        data: VideoRecords | TiledRecords | ChatRecords
        if kind in VIDEO_KINDS:
            if options.bytes_per_token or options.seq_length:
                raise ConfigError("--bytes-per-token and --seq-length have no effect on rows of latents; remove them.")
            assert self.model_file is not None, "records are sized by the model"
            data = VideoRecords(data_file, read_latent_sizes(self.model_file))
        else:
            data = TiledRecords(data_file) if kind == TILED_KIND else ChatRecords(read_format(data_file), model)
        records = data.records.records

        def measure() -> Measured:
            size_of, tokens_by = data.counting(options.bytes_per_token, options.seq_length)
            chosen = self._chosen(len(records))

            def of_json(name: str, raw: bytes) -> SampleSize:
                record = msgspec.json.decode(raw)
                if not isinstance(record, dict):
                    raise ConfigError("a record must be an object.")
                return size_of(name, record)

            return *self._read(of_json, (records[index] for index in chosen), len(chosen)), tokens_by, len(records)

        parts = (*data.settings, repr(model), repr(options), len(records))
        return self._described("records", data.files, data.records.sha256, parts, measure)

    def lengths(self, file: Path, kind: Literal["lengths", "indexed"]) -> tuple[Distribution, tuple[str, ...]]:
        """Read a list of lengths, or the documents of a Megatron data set."""
        model, lengths = self.model, read_lengths(file) if kind == "lengths" else read_indexed(file)
        if not len(lengths):
            raise ConfigError(f"{file} has no documents with tokens.")

        def measure() -> Measured:
            chosen = self._chosen(len(lengths))
            found = [(f"{file}[{index}]", SampleSize(tokens=int(lengths[index]))) for index in chosen]
            return found, [], "given", len(lengths)

        digest = hashlib.sha256(lengths.tobytes()).hexdigest()
        return self._described(kind, (file,), digest, (kind, repr(self.options), model.max_tokens), measure)

    def table(self, path: Path, tokenizer: str | None = None) -> tuple[Distribution, tuple[str, ...]]:
        """Read the rows of a table, a folder of tables or WebDataset tars (``tables``).

        ``tokenizer``: folder of the tokenizer for texts; without it bytes are counted.
        """
        options, model, files = self.options, self.model, table_files(path)
        digest = digest_of(files)

        def rows() -> Iterator[tuple[str, Row]]:
            return (row for file in files for row in read_rows(file))

        def measure() -> Measured:
            count, tokens_by = text_counter(tokenizer, options.bytes_per_token)
            sizes = SampleSizes(model, _PIXELS, count, options.seq_length)
            number = sum(1 for _ in rows()) if options.max_read else 0
            chosen = set(self._chosen(number))
            picked = (row for index, row in enumerate(rows()) if not options.max_read or index in chosen)
            found, broken = self._read(lambda _, row: size_of_row(row, sizes), picked, len(chosen))
            return found, broken, tokens_by, number or len(found) + len(broken)

        return self._described("table", files, digest, ("table", tokenizer, repr(model), repr(options)), measure)

    def _chosen(self, number: int) -> list[int]:
        """Return the records to read: all, or a sample without replacement, in the order of the data."""
        most = self.options.max_read
        if not most or number <= most:
            return list(range(number))
        return sorted(random.Random(self.options.seed).sample(range(number), most))

    def _read(
        self, size_of: Callable[[str, Any], SampleSize], items: Iterator[tuple[str, Any]], number: int
    ) -> tuple[list[Named], list[str]]:
        """Return the sizes of ``items`` by name, and what was wrong with those left out; ``number`` 0: unknown."""
        found: list[Named] = []
        broken: list[str] = []
        reported = time.monotonic()

        def read(item: tuple[str, Any]) -> Named | ConfigError:
            try:
                return item[0], size_of(*item)
            except (ConfigError, msgspec.DecodeError, UnicodeDecodeError) as error:
                return (LeftOut if isinstance(error, LeftOut) else ConfigError)(f"{item[0]}: {error}")

        with ThreadPoolExecutor(_NUM_READERS) as pool:
            while part := list(islice(items, _AT_ONCE)):
                for one in pool.map(read, part):
                    if not isinstance(one, ConfigError):
                        found.append(one)
                    elif self.options.skip_broken or isinstance(one, LeftOut):
                        broken.append(str(one))
                    else:
                        raise ConfigError(f"{one} Fix the record, or skip broken ones with --skip-broken.")
                if time.monotonic() - reported > _EVERY_S:
                    reported = time.monotonic()
                    every = f" of {number}" if number else ""
                    self.progress(f"{len(found) + len(broken)}{every} records read, {len(broken)} broken")
        return found, broken

    def _described(
        self, kind: str, files: Sequence[Path], sha256: str, parts: Sequence[object], measure: Callable[[], Measured]
    ) -> tuple[Distribution, tuple[str, ...]]:
        """Return the distribution of the samples as trained: texts are cut at ``--seq-length``.

        ``parts``: everything except the content of ``files`` that affects sizes.
        """
        fingerprint = hashlib.sha256(json.dumps([VERSION, sha256, *map(str, parts)]).encode()).hexdigest()
        if self.known is not None and self.known.source.fingerprint == fingerprint:
            return self.known, ()
        found, broken, tokens_by, number = measure()
        if not found:
            reason = (
                f"all {len(broken)} records are broken or skipped; the first: {broken[0]}" if broken else "no record."
            )
            raise ConfigError(f"{shown(', '.join(map(str, files)), 200)}: {reason}")
        length = self.options.seq_length
        limit = length or self.model.max_tokens
        longest, longest_size = max(found, key=lambda item: item[1].tokens)
        num_longer = sum(size.tokens > limit for _, size in found) if limit else 0
        if num_longer and not length:
            raise ConfigError(
                f"{num_longer} of {len(found)} samples are longer than max_position_embeddings {limit} of "
                f"{self.model_file}; the longest, {longest}, has {longest_size.tokens} tokens. Give the training's "
                "--seq-length, at which texts are cut."
            )
        source = DataSource(
            kind=kind,
            files=tuple(map(str, files)),
            sha256=sha256,
            tokens_by=tokens_by,
            num_records=number,
            num_read=len(found) + len(broken),
            num_broken=len(broken),
            num_cut=num_longer,
            longest_tokens=length,
            seed=self.options.seed,
            fingerprint=fingerprint,
            longest_record=longest,
        )
        cut = (size._replace(tokens=min(size.tokens, limit or size.tokens)) for _, size in found)
        return make_distribution(source, cut), tuple(broken)
