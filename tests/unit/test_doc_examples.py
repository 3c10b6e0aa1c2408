"""Command blocks of the pages run as printed, and print lines of the shape that the page shows.

A block is run by bash in a folder that holds ``docs`` and ``tests``; ``python``, ``torchrun`` and
``mindspeed-autoparallel`` are programs forked from one process. Blocks of a page run in order and leave their files to
the next. What no checkout can run (a checkout of a host, a checkpoint, a second node) is recognised by ``NEEDS``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from example_plan import example_plan
from forked_python import forked_python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "skills").rglob("*.md"))]
PROGRAMS = ("mindspeed-autoparallel ", "python ", "torchrun ", "bash ", "export ", "PYTHON=")
NEEDS = {
    "arguments of the reader": r" \.\.\.|<your|\$(GPT|MM|VLM)_ARGS",
    "a checkout of a host": r"Megatron-LM|MindSpeed|hosts/megatron-lm|rows\.jsonl",
    "a checkpoint or model of the reader": r"\bckpt\b|hf:path/|DeepSeek-V3/|my_model",
    "measurements or logs of the reader": r"DATA\.json|train\.log|base\.sqlite",
    "other nodes": r"--peers",
    "a profile of the reader": r"--data distribution.json",
    "an installation of its own": r"quickstart\.sh|tests/run\.sh|tests/lint\.sh|tests/fast\.sh|cyclonedx",
}
"""What a checkout lacks to run a block, by what its text then has."""
LONG = {
    "auto-tuning.md",
    "hetero-from-zero.md",
    "hetero-parallel.md",
    "plan.md",
    "analytic.md",
    "operators.md",
    "predict.md",
    "trace.md",
}
"""Pages whose blocks take long and whose features other tests run."""


@dataclass(frozen=True)
class Block:
    """A block of commands and, where the page shows one right below, its output."""

    line: int
    text: str
    output: tuple[str, ...]

    @property
    def lacks(self) -> str:
        """What a checkout lacks to run it; empty: nothing."""
        return next((what for what, sign in NEEDS.items() if re.search(sign, self.text)), "")


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of commands of a page, fenced or indented."""
    found: list[tuple[int, list[str]]] = []
    fenced, inside, previous = False, False, ""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence, indented = line.startswith("```"), line.startswith("    ") and not fenced
        if (fence and not fenced) or (indented and not inside and not previous.strip()):
            found.append((number, []))
        if fence:
            fenced = not fenced
        inside = fenced or (indented and (inside or not previous.strip()))
        if inside and not fence:
            found[-1][1].append(line[4:] if indented else line)
        previous = line
    blocks = []
    text = page.read_text("utf-8").splitlines()
    for at, (number, lines) in enumerate(found):
        if not any(line.startswith(PROGRAMS) for line in lines):
            continue
        following = found[at + 1] if at + 1 < len(found) else (0, [])
        between = [
            line
            for line in text[number + len(lines) - (not text[number - 1].startswith("```")) : following[0] - 1]
            if line.strip("`").strip()
        ]
        adjacent = all(line.startswith("prints") for line in between)
        shown = () if not adjacent or any(line.startswith(PROGRAMS) for line in following[1]) else tuple(following[1])
        blocks.append(Block(number, "\n".join(lines), shown))
    return blocks


def pattern_of(line: str) -> str:
    """Return a pattern of lines like ``line``: other numbers, other words where it has dots."""
    escaped = re.escape(re.sub(r"\s+", " ", line.strip()))
    escaped = re.sub(r"\\ ?(?:\\\.){3}(?:\\ )?", ".*", escaped)
    return re.sub(r"\d+(?:(?:\\\.|,)\d+)*(?:e-?\d+)?", r"[-+\\d.,e]+", escaped).replace(r"\ ", r"\s*")


def missing_lines(shown: tuple[str, ...], printed: str) -> list[str]:
    """Return the shown lines that nothing printed looks like, in their order."""
    rest, missing = [re.sub(r"\s+", " ", line.strip()) for line in printed.splitlines()], []
    for line in shown:
        if not line.strip() or line.strip() == "...":
            continue
        at = next((at for at, one in enumerate(rest) if re.fullmatch(pattern_of(line), one)), None)
        if at is None:
            missing.append(line)
        else:
            rest = rest[at + 1 :]
    return missing


def workspace(folder: Path) -> dict[str, str]:
    """Make the folder a page is followed in; return the variables of its commands."""
    shutil.copytree(ROOT / "docs", folder / "docs")  # some commands write beside what they read
    (folder / "tests").symlink_to(ROOT / "tests")
    programs = folder / ".programs"
    programs.mkdir()
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run"),
                        ("mindspeed-autoparallel", "-m mindspeed_autoparallel")):  # fmt: skip
        (programs / name).write_text(f'#!/bin/bash\nexec {forked_python()} {words} "$@"\n')
        (programs / name).chmod(0o755)
    example_plan().write(folder / "plan.json")
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


RUNNABLE = {page: [block for block in blocks_of(page) if not block.lacks] for page in PAGES}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.long] if page.name in LONG else [])
        for page, blocks in RUNNABLE.items()
        if blocks
    ],
)
@pytest.mark.slow
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    variables = workspace(tmp_path)
    kept = tmp_path / ".variables"  # what one block sets, the next ones see
    for block in RUNNABLE[page]:
        text = f"set -eu\n[ ! -e {kept} ] || . {kept}\nset -a\n{block.text.removeprefix('$ ')}\n"
        text += f"set +a\ndeclare -p $(compgen -v | grep -E '^[a-z]') 2>/dev/null | grep -v '^declare -[a-z]*r' > {kept} || true\n"
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500
        )
        where = f"{page.name}:{block.line}\n{block.text}\n"
        # The doctor ends with 1 where this machine has something to mend.
        assert done.returncode == 0 or (done.returncode == 1 and page.name == "doctor.md"), (
            where + done.stdout[-1500:] + done.stderr[-3000:]
        )
        assert not missing_lines(block.output, done.stdout + done.stderr), where + done.stdout[-3000:]


def test_most_blocks_run() -> None:
    assert sum(map(len, RUNNABLE.values())) >= 15


def test_lines_are_compared_in_shape() -> None:
    shown = ("stage   0  vit 28 (0 recomputed)  ...", "...", "step 60.5 ms, optimal")
    assert missing_lines(shown, "stage 0 vit 3 (12 recomputed) x\nother\nstep 1,234.5 ms, optimal\n") == []
    assert missing_lines(shown, "stage 0 vit 3 (12 recomputed)  x\nstep 7 ms\n") == [shown[2]]
