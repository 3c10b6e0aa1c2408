"""The Chinese pages have the headings, tables and code of the English ones, so that they cannot drift apart."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "zh" / "api.md"
"""An index of the English page: a line per name, without signatures and fields."""
PAGES = {
    ROOT / "README.md": ROOT / "README.zh.md",
    **{ROOT / "docs" / page.name: page for page in sorted((ROOT / "docs" / "zh").glob("*.md")) if page != INDEX},
}
OTHER_WORDS = ("微批次", "令牌", "间隙", "重算", "气泡", "规约", "流水级", "拆分")
"""Words for what the pages call 微批, token, 差距, 重计算, 空泡, 归约, 阶段 and 切分; the report calls a plan 计划 and a step time 步时."""
PAIRS = pytest.mark.parametrize(("english", "chinese"), PAGES.items(), ids=[page.stem for page in PAGES])


def fences(page: Path) -> list[str]:
    return re.findall(r"(?m)^```.*?^```", page.read_text("utf-8"), flags=re.DOTALL)


def without_fences(page: Path) -> str:
    return re.sub(r"(?m)^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL)


def indented(page: Path) -> list[str]:
    return re.findall(r"(?m)^    .*$", without_fences(page))


def tables(page: Path) -> list[list[list[str]]]:
    found = []
    for block in re.findall(r"(?m)(?:^\|.*\|$\n?)+", without_fences(page)):
        found.append([re.split(r" \| ", row.strip("| ")) for row in block.splitlines()])
    return found


def code_in(text: str) -> list[str]:
    return sorted(re.findall(r"`([^`]+)`", text))


@PAIRS
def test_headings_have_the_same_levels(english: Path, chinese: Path) -> None:
    levels = [re.findall(r"(?m)^(#+) ", without_fences(page)) for page in (english, chinese)]
    assert levels[0] == levels[1]


@PAIRS
def test_code_is_the_same(english: Path, chinese: Path) -> None:
    assert fences(chinese) == fences(english)
    assert indented(chinese) == indented(english)


@PAIRS
def test_tables_have_the_same_rows_columns_and_code(english: Path, chinese: Path) -> None:
    ours, theirs = tables(chinese), tables(english)
    assert [[len(row) for row in table] for table in ours] == [[len(row) for row in table] for table in theirs]
    first_columns = [[[code_in(row[0]) for row in table] for table in page] for page in (ours, theirs)]
    assert first_columns[0] == first_columns[1]


@PAIRS
def test_every_flag_of_the_english_page_is_named(english: Path, chinese: Path) -> None:
    flags = [set(re.findall(r"--[a-z][a-z0-9-]+", page.read_text("utf-8"))) for page in (english, chinese)]
    assert flags[0] == flags[1]


@PAIRS
def test_the_page_is_in_chinese(english: Path, chinese: Path) -> None:
    text = re.sub(r"`[^`]*`|\(.*?\)", "", without_fences(chinese))
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 0.3 * len(re.findall(r"[A-Za-z]", text))
    titles = [title for title in re.findall(r"(?m)^#+ (.*)", text) if not re.fullmatch(r"[a-z-]+", title)]
    assert len([title for title in titles if re.search(r"[\u4e00-\u9fff]", title)]) >= len(titles) / 2


@PAIRS
def test_each_page_links_to_the_other(english: Path, chinese: Path) -> None:
    for page, label, other in ((english, "中文", chinese), (chinese, "English", english)):
        link = re.search(rf"(?m)^\[{label}\]\((.*)\)$", page.read_text("utf-8"))
        assert link is not None
        assert (page.parent / link[1]).resolve() == other


@PAIRS
def test_one_word_for_each_thing(english: Path, chinese: Path) -> None:
    text = chinese.read_text("utf-8")
    assert [word for word in OTHER_WORDS if word in text] == []


def test_the_report_uses_the_words_of_the_pages() -> None:
    texts = json.loads((ROOT / "mindspeed_autoparallel" / "report" / "static" / "zh.json").read_text("utf-8"))
    words = (*OTHER_WORDS, "方案", "单步时间", "microbatch ")
    found = [(word, text) for part in texts.values() for text in part.values() for word in words if word in f"{text} "]
    assert found == []


def test_every_page_that_a_user_reads_is_there_in_chinese() -> None:
    english = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert english == {page.name for page in (ROOT / "docs" / "zh").glob("*.md")}


def test_every_text_of_a_generated_page_has_a_translation_and_every_translation_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    from generate import pages  # type: ignore[import-not-found]

    _, chinese = pages()
    assert chinese.missing == []
    assert chinese.unused == []


def test_the_chinese_index_leads_to_every_name_of_the_english_page() -> None:
    names = re.findall(r"(?m)^### (\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"))
    assert re.findall(r"(?m)^\| \[`(\w+)`\]", INDEX.read_text("utf-8")) == names
