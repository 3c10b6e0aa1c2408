"""Damaged .npy files of lengths end in one line, for any header."""

import io
import random

import numpy
import pytest

from mindspeed_autoparallel.data.lengths import read_lengths
from mindspeed_autoparallel.errors import ConfigError


def _saved(values, version=None):
    content = io.BytesIO()
    numpy.lib.format.write_array(content, numpy.asarray(values), version)
    return content.getvalue()


@pytest.mark.parametrize("kind", ["<i4", "<i8", ">u2", "<f8"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_good_files_are_read(tmp_path, kind, version):
    (tmp_path / "a.npy").write_bytes(_saved(numpy.array([3, 1, 2], kind), version))
    assert read_lengths(tmp_path / "a.npy").tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-3,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (True,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': ('<i8', (2**70,)), 'fortran_order': False, 'shape': (3,), }",
        "{" * 900,
        "(" * 9000,
        "\\x00",
    ],
)
def test_a_hostile_header_is_one_line(tmp_path, header):
    text = header.encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(24))
    with pytest.raises(ConfigError, match=r"cannot read list of lengths .*a\.npy") as caught:
        read_lengths(tmp_path / "a.npy")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_changed_bytes_of_the_header_raise_nothing_else(tmp_path):
    source = random.Random(7)
    good = _saved(numpy.arange(1, 9))
    refused = 0
    for _ in range(500):
        content = bytearray(good)
        for _ in range(source.randint(1, 3)):
            content[source.randrange(len(good) - 64)] = source.randrange(256)
        (tmp_path / "a.npy").write_bytes(content[: source.choice((len(content), source.randrange(len(content))))])
        try:
            read_lengths(tmp_path / "a.npy")
        except ConfigError as error:
            refused += "\n" not in str(error)
    assert refused > 300
