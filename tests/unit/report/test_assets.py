"""Scripts and style sheets are files that tools of their kind can read, and that a page may hold."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from mindspeed_autoparallel.report.markup import NUM_COLOURS, read_asset

STATIC = Path(str(files("mindspeed_autoparallel.report"))) / "static"


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the syntax")
@pytest.mark.parametrize("path", sorted(STATIC.glob("*.js")), ids=lambda path: path.name)
def test_the_script_is_javascript(path: Path) -> None:
    done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_an_asset_cannot_end_the_element_it_is_put_into(path: Path) -> None:
    assert not re.search(r"</(script|style)|<!--", read_asset(path.name), re.IGNORECASE)


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.css")), ids=lambda path: path.name)
def test_blocks_of_a_style_sheet_are_closed(path: Path) -> None:
    text = re.sub(r"/\*.*?\*/|\"[^\"]*\"", "", read_asset(path.name), flags=re.DOTALL)
    assert text.count("{") == text.count("}") > 0


def test_every_colour_has_its_class() -> None:
    assert all(f".c{index} {{ background-color" in read_asset("report.css") for index in range(NUM_COLOURS))
    assert f".c{NUM_COLOURS} {{" not in read_asset("report.css")
