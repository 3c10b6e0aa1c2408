"""Reading safetensors with plain reads gives what the package wrote, and refuses what is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights.safetensors_file import SafetensorsFile

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

pytestmark = pytest.mark.torch


def test_every_type_and_shape_is_read_to_the_bit(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "float8_e4m3fn"]
    stored = {name: torch.randn(3, 5).mul(9).to(getattr(torch, name)) for name in names}
    stored |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(stored, tmp_path / "one.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "one.safetensors")
    assert set(file.keys()) == set(stored)
    for name, tensor in stored.items():
        read = file.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.contiguous().reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": 1}x',
        (9).to_bytes(8, "little") + b'{"a": 1} ',
    ],
    ids=["empty", "short", "huge header", "a list", "no JSON", "no description"],
)
def test_files_that_are_none_are_called_corrupt(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.safetensors is corrupt"):
        SafetensorsFile(tmp_path / "bad.safetensors")
