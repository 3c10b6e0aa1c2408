"""The documents name files, commands and flags that are there."""

import re
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import build_parser
from mindspeed_autoparallel.runtime.flags.flag import flags_of as flags_of_group
from mindspeed_autoparallel.runtime.flags.registration import flag_groups

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
USER_PAGES = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
HISTORY = re.compile(
    r"\b(previously|formerly|originally|until now|since then|in earlier versions|was (renamed|mended)|"
    r"used to (be|have|give|take|report|run|say|hold))\b",
    re.IGNORECASE,
)
"""Words of what was: pages say what is; CHANGELOG.md and the measurements of docs/validation tell the rest."""
DIALECT = re.compile(
    r"\b((is|are|was|were) (told|asked|said|pretended)|knows|believes|remembers|asks|tells|hears|wants|given up|gives up|"
    r"looks at|what becomes of|(has|have) not got|(stands?|lies?) (beside|in front)|of interest|nobody|nothing is said)\b"
)
"""Programs as people, and phrases that native readers stumble over."""
GENERATED = {ROOT / "docs" / f"{name}.md" for name in ("api", "commands", "flags", "patches")}
"""Pages whose words are docstrings and help texts."""
COMMAND = re.compile(r"mindspeed-autoparallel ([a-z]+)((?:[^\n`]*\\\n)*[^\n`]*)")


def flags_of(command: str) -> set[str]:
    """Of a command of ``mindspeed-autoparallel``."""
    (chosen,) = (action for action in build_parser([command])._actions if action.dest == "command")
    assert isinstance(chosen.choices, dict)
    found = list(chosen.choices[command]._actions)
    for action in list(found):
        # A command of commands: the flags of all of them.
        parts = action.choices.values() if isinstance(action.choices, dict) else ()
        found += [inner for part in parts for inner in part._actions]
    return {flag for action in found for flag in action.option_strings}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not dead


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_into_pages_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)]*)\)", page.read_text())
    local = [(page.parent / file if file else page, anchor) for file, anchor in links if "://" not in file]
    assert [f"{file.name}#{anchor}" for file, anchor in local if anchor not in headings(file)] == []


def test_every_path_of_the_tour_is_there() -> None:
    quoted = re.findall(r"`([^`]+)`", (ROOT / "docs/tour.md").read_text())
    paths = [re.sub(r"\s", "", path) for path in quoted if re.fullmatch(r"[\w./\s]+(/|\.py|\.toml)", path)]
    assert len(paths) > 30
    rooms = [ROOT, ROOT / "mindspeed_autoparallel", *(ROOT / "mindspeed_autoparallel").glob("*/"), ROOT / "tests"]
    rooms += [ROOT / "mindspeed_autoparallel/runtime" / name for name in ("features", "profiling", "profiling/measure")]
    assert [path for path in paths if not any((room / path).exists() for room in rooms)] == []


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_commands_and_their_flags_are_those_of_the_program(page: Path) -> None:
    for command, rest in COMMAND.findall(page.read_text()):
        flags = re.findall(r"(?<=\s)--[a-z][\w-]*", re.split(r"\s-- |#", rest)[0])
        unknown = set(flags) - flags_of(command)
        assert not unknown, f"{command}: {unknown}"


REFERENCE = (ROOT / "docs" / "commands.md").read_text("utf-8")
NAMES = re.findall(r"(?m)^## (.*)$", REFERENCE)
SHORT = re.compile(rf"`({'|'.join(NAMES)})((?: (?!-)[\\w./]+)?(?: [^`\\n]*)?)`")
"""A command in running text, without the program's name: ``plan --data``."""
OF_TABLES = {
    "analytic": ("plan",),
    "data": ("data", "plan"),
    "plan": ("plan",),
    "replan": ("replan",),
    "split": ("split",),
    "weights": ("convert",),
}
"""Pages with tables of flags, and the commands that have them."""


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_commands_in_running_text_have_the_flags_beside_them(page: Path) -> None:
    for command, rest in SHORT.findall(page.read_text()):
        flags = re.findall(r"(?<=\s)--[a-z][\w-]*", rest)
        assert set(flags) <= flags_of(command), f"{command}{rest}"


@pytest.mark.parametrize("name", OF_TABLES)
def test_the_flags_of_a_table_are_those_of_its_command(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    tables = re.findall(r"(?m)^\| (?:option|flag) \|.*\n((?:\|.*\n)+)", text)
    cells = [cell for table in tables for cell in re.findall(r"(?m)^\| (`--[^|]*)\|", table)]
    named = {flag for cell in cells for flag in re.findall(r"--[a-z][\w-]*", cell)}
    assert len(named) > 4
    assert named <= {flag for command in OF_TABLES[name] for flag in flags_of(command)}


@pytest.mark.parametrize("command", NAMES)
def test_every_flag_of_a_command_has_a_meaning_in_the_reference(command: str) -> None:
    (part,) = re.findall(rf"(?ms)^## {command}$(.*?)(?=^## |\Z)", REFERENCE)
    rows = re.findall(r"(?m)^\| (`-[^|]*)\|[^|]*\|(.*)\|$", part)
    named = {flag for cell, _ in rows for flag in re.findall(r"--?[a-z][\w-]*", cell)}
    assert flags_of(command) - {"-h", "--help"} - named == set()
    assert [cell for cell, meaning in rows if not meaning.strip()] == []


def test_every_flag_that_a_page_gives_a_script_of_ours_is_registered() -> None:
    ours = {flag.name for group in flag_groups() for flag in flags_of_group(group)}
    prefixes = ("--auto-tuning", "--auto-parallel", "--hetero", "--operator", "--simulated", "--profile")
    commands = {flag for command in ("plan", "calibrate", "convert") for flag in flags_of(command)}
    for page in USER_PAGES:
        named = set(re.findall(r"--[a-z][a-z-]*[a-z]", page.read_text()))
        unknown = {flag for flag in named if flag.startswith(prefixes)} - ours - commands
        assert not unknown, name_of(page)


@pytest.mark.parametrize("page", [page for page in PAGES if "validation" not in page.parts], ids=name_of)
def test_pages_tell_no_history(page: Path) -> None:
    assert [match.group() for match in HISTORY.finditer(page.read_text())] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED], ids=name_of)
def test_pages_are_in_plain_english(page: Path) -> None:
    prose = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`|\"[^\"\n]*\"", "", page.read_text())
    assert [match.group() for match in DIALECT.finditer(prose)] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "validation").glob("*.md")), ids=name_of)
def test_a_topic_of_the_validation_takes_two_screens(page: Path) -> None:
    lines = page.read_text().splitlines()
    # A long line of prose counts as the lines of 140 characters that it fills, a row of a table as one.
    assert sum(1 if line.startswith("|") else -(-len(line) // 140) or 1 for line in lines) <= 120
