"""Lengths of text samples: lists in text, JSON or numpy files, and the index files of Megatron's data sets."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy

from mindspeed_autoparallel.data.work import Array
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_bytes, read_json, read_text, shown

MAX_LIST_BYTES = 2**30
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_LARGEST = 2**40
_NPY_HEADERS = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}


def read_lengths(file: Path) -> Array:
    """Return the lengths in ``file``, int64: ``.npy``, ``.json`` (a list), or text with a number in each line.

    Raises ``ConfigError`` with the line or index of an invalid length: NaN, fractions, less than one token.
    """
    if file.suffix == ".npy":
        values, place = _numpy_values(file), "index"
    elif file.suffix == ".json":
        values, place = read_json(file, "list of lengths"), "index"
        if not isinstance(values, list):
            raise ConfigError(f"list of lengths {file} must be a list of numbers, not {shown(values)}.")
    else:
        lines = read_text(file, "list of lengths", MAX_LIST_BYTES).splitlines()
        return _checked([line.strip() for line in lines if line.strip()], file, "line")
    return _checked(values, file, place)


def read_indexed(prefix: Path) -> Array:
    """Return the tokens of every document of a Megatron data set, ``PREFIX.idx`` (or its prefix), int64.

    A document may be several sequences. Raises ``ConfigError`` for a file that is not an index or is truncated.
    """
    file = prefix if prefix.suffix == ".idx" else prefix.with_name(prefix.name + ".idx")
    content = read_bytes(file, "index of the data set", MAX_LIST_BYTES * 16)
    if len(content) < _HEADER.size or content[: len(_MAGIC)] != _MAGIC:
        raise ConfigError(f"{file} is not a Megatron index file (it should begin with MMIDIDX).")
    _, version, _, num_sequences, num_ends = _HEADER.unpack_from(content)
    needed = _HEADER.size + 12 * num_sequences + 8 * num_ends
    if version != 1 or len(content) < needed:
        raise ConfigError(
            f"{file}: version {version}, {len(content)} bytes where version 1 with {needed} was expected."
        )
    lengths: Array = numpy.frombuffer(content, numpy.int32, num_sequences, _HEADER.size).astype(numpy.int64)
    ends: Array = numpy.frombuffer(content, numpy.int64, num_ends, _HEADER.size + 12 * num_sequences)
    if num_ends < 2 or ends[0] != 0 or ends[-1] != num_sequences or (numpy.diff(ends) < 0).any():
        raise ConfigError(f"{file}: its document index does not cover its {num_sequences} sequences; build it again.")
    total = numpy.concatenate(([0], numpy.cumsum(lengths)))
    documents = total[ends[1:]] - total[ends[:-1]]
    if (lengths < 0).any():
        raise ConfigError(f"{file}: sequence {int(lengths.argmin())} has {int(lengths.min())} tokens; build it again.")
    return documents[documents > 0]


def _numpy_values(file: Path) -> Any:
    try:
        content = io.BytesIO(read_bytes(file, "list of lengths", MAX_LIST_BYTES * 8))
        read_header = _NPY_HEADERS.get(numpy.lib.format.read_magic(content))
        if read_header is None:
            raise ValueError("unknown version of the .npy format")
        shape, _, kind = read_header(content)
        if (
            len(shape) != 1
            or kind.kind not in "iuf"
            or len(content.getbuffer()) - content.tell() != shape[0] * kind.itemsize
        ):
            raise ValueError(
                f"its header has shape {shown(shape)} and type {shown(kind)}, which its bytes do not match"
            )
        values = numpy.frombuffer(content.getbuffer(), kind, shape[0], content.tell())
    except ConfigError:
        raise
    except Exception as error:  # numpy evaluates the header's text: anything if damaged
        reason = shown(" ".join(str(error).split()), 200)
        raise ConfigError(f"cannot read list of lengths {file}: {reason}. Save one dimension of numbers.") from error
    return values


def _checked(values: Any, file: Path, place: str) -> Array:
    try:
        lengths = numpy.asarray(values, dtype=numpy.float64)
    except (TypeError, ValueError):
        lengths = numpy.array([_number(value) for value in values])
    if not len(lengths):
        raise ConfigError(f"list of lengths {file} is empty.")
    with numpy.errstate(invalid="ignore"):
        wrong = ~(numpy.isfinite(lengths) & (lengths >= 1) & (lengths <= _LARGEST) & (lengths == numpy.floor(lengths)))
    if wrong.any():
        first = int(wrong.argmax())
        where = first + 1 if place == "line" else first
        raise ConfigError(
            f"list of lengths {file}, {place} {where}: {shown(str(values[first]))} is not a number of tokens; "
            "give whole numbers of at least 1, one per sample."
        )
    return lengths.astype(numpy.int64)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
