"""Files from outside are read within bounds; names with bytes outside UTF-8 that are written can be read."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import (
    MAX_INPUT_BYTES,
    json_text,
    loads_json,
    made_folder,
    read_json,
    write_text_atomic,
)
from mindspeed_autoparallel.hosts.yaml_edit import load_tree
from mindspeed_autoparallel.operators.config import read_config

SIZES = {"model": {"type": "gpt", "num_layers": 4, "hidden": 512, "heads": 8, "seq": 512}}
PLAN = ("plan", "--profile-source", "analytic", "--device", "H100", "--nnodes", "1", "--nproc-per-node", "2")


def test_json_of_a_name_with_a_byte_outside_utf8_can_be_read():
    assert loads_json(json_text({"m\udcff": ["\udc80x", "\u4e09"]})) == {"m?": ["?x", "\u4e09"]}
    whole = {"a": "\U0001f600 \\ud800 \u4e09"}
    assert loads_json(json_text(whole)) == whole
    assert json_text(whole) == json.dumps(whole, indent=2) + "\n"


def test_a_text_with_such_a_name_is_written(tmp_path):
    write_text_atomic(tmp_path / "page.html", "m\udcff")
    assert (tmp_path / "page.html").read_bytes() == b"m?"


def test_a_plan_of_a_model_file_with_such_a_name_can_be_read(tmp_path, monkeypatch, capsys):
    model = tmp_path / "m\udcff.json"
    model.write_text(json.dumps(SIZES))
    words = (
        *PLAN,
        "--global-batch-size",
        "4",
        "--time-limit-s",
        "5",
        "--model",
        str(model),
        "--out",
        str(tmp_path / "out"),
    )
    monkeypatch.setattr("sys.argv", ["mindspeed-autoparallel", *words])
    assert main([*words, "--json", "--num-workers", "1"]) == 0
    (tmp_path / "printed.json").write_text(capsys.readouterr().out)
    for name in ("out/plan.json", "printed.json"):
        assert main(["report", "--plan", str(tmp_path / name)]) == 0


def test_a_file_above_64_mib_is_refused_before_it_is_parsed(tmp_path):
    with (tmp_path / "large.json").open("wb") as stream:
        stream.truncate(MAX_INPUT_BYTES + 1)
    with pytest.raises(ConfigError, match=r"large\.json has more than the 67108864 bytes"):
        read_json(tmp_path / "large.json", "plan")


@pytest.mark.skipif(sys.platform != "linux", reason="named pipes and devices")
def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_json(path, "plan")


def test_yaml_builds_no_objects(tmp_path):
    (tmp_path / "config.yaml").write_text("a: !!python/object/apply:os.mkdir [made]\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_config(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_tree((tmp_path / "config.yaml").read_text(), "config.yaml")


def test_yaml_aliases_cannot_multiply(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    text = "\n".join(lines)
    with pytest.raises(ConfigError, match=r"aliases .* more than 100000 values"):
        load_tree(text, "config.yaml")
    with pytest.raises(ConfigError, match="aliases"):
        load_tree("a: &a [*a]", "config.yaml")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"aliases .* more than 100000 values"):
        read_config(tmp_path / "config.yaml")
    assert load_tree("a: &a {b: 1}\nc: *a", "config.yaml") == {"a": {"b": 1}, "c": {"b": 1}}


def test_a_folder_for_results_is_made_and_probed(tmp_path, monkeypatch):
    assert made_folder(tmp_path / "a/b", "--out").is_dir() and not list((tmp_path / "a/b").iterdir())
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match=r"--out .*file.* cannot be a folder: .*Name another"):
            made_folder(path, "--out")

    def read_only(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(ConfigError, match=r"--out .* cannot be written to: Read-only file system. Name another"):
        made_folder(tmp_path, "--out")
