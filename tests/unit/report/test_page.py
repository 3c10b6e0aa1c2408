"""The page: well-formed, self-contained, escaped, and alive in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from example_pages import KINDS, example_page
from example_plan import _step_us, example_plan

from mindspeed_autoparallel.report import render_page
from mindspeed_autoparallel.report.document import in_chinese, texts_of
from mindspeed_autoparallel.report.markup import term_colour
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.plan_records import EDITED

VOID = {"meta", "input", "br", "link", "img"}
HOSTILE = "</script><script>document.documentElement.dataset.error='hacked'</script><img src=x onerror=alert(1)>\"'&"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Checker(HTMLParser):
    """Collects elements and their text; fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}> at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parse(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def hostile_plan() -> Plan:
    plan = example_plan()
    model = replace(
        plan.model,
        name=HOSTILE,
        modules=tuple(replace(m, name=m.name + HOSTILE, predecessors=()) for m in plan.model.modules),
    )

    def renamed(row: dict) -> dict:
        return {name + HOSTILE: value for name, value in row.items()}

    stages = tuple(
        replace(s, layers=renamed(s.layers), first_layer=renamed(s.first_layer), recompute=renamed(s.recompute))
        for s in plan.stages
    )
    memory = tuple(replace(rank, terms=renamed(rank.terms), peak_point=HOSTILE) for rank in plan.memory)
    verdicts = tuple(replace(v, reason=HOSTILE, outcome=v.outcome + HOSTILE) for v in plan.search.verdicts)
    search = replace(
        plan.search,
        verdicts=verdicts,
        limits=(HOSTILE,),
        relaxations=(replace(plan.search.relaxations[0], change=HOSTILE),),
    )
    profile = replace(plan.profile, device=HOSTILE, notes=(HOSTILE,), sha256=HOSTILE)
    baselines = tuple(replace(base, name=HOSTILE, note=HOSTILE) for base in plan.baselines)
    return replace(
        plan,
        model=model,
        stages=stages,
        memory=memory,
        search=search,
        profile=profile,
        baselines=baselines,
        tool_version=HOSTILE,
    )


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(example_plan())


def test_page_is_well_formed_with_unique_ids(page: str) -> None:
    ids = [attributes["id"] for _, attributes in parse(page).seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"why", "stages", "memory", "timeline", "alternatives", "ruled-out", "provenance"} <= set(ids)


def test_links_of_the_page_lead_to_its_sections(page: str) -> None:
    seen = parse(page).seen
    ids = {attributes.get("id") for _, attributes in seen}
    links = [attributes["href"] for tag, attributes in seen if tag == "a"]
    assert links and all(link is not None and link[0] == "#" and link[1:] in ids for link in links)


def test_page_names_the_commands_that_train_by_the_plan_and_convert_weights_for_it(page: str) -> None:
    assert "--auto-parallel-plan plan.json" in page
    assert "convert hf-to-mm HF_FOLDER TARGET --plan plan.json" in page
    assert "convert resplit CHECKPOINT TARGET --hf-dir HF_FOLDER --plan plan.json" in page


def test_page_needs_no_network(page: str) -> None:
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", page)
    for tag, attributes in parse(page).seen:
        assert tag not in ("link", "img", "iframe", "object", "embed"), tag
        assert "src" not in attributes
    assert "default-src 'none'" in page


def test_memory_bars_are_as_wide_as_their_bytes(page: str) -> None:
    plan = example_plan()
    widths = [
        float(str(attributes["style"]).split(":")[1].rstrip("%"))
        for tag, attributes in parse(page).seen
        if tag == "i" and str(attributes.get("data-tip", "")).startswith("Rank 2:")
    ]
    assert len(widths) == sum(size > 0 for size in plan.memory[2].terms.values())
    assert sum(widths) / 100 * 1.02 == pytest.approx(plan.memory[2].peak_bytes / plan.memory[2].limit_bytes, rel=1e-3)


def test_every_verdict_is_on_the_page(page: str) -> None:
    words = parse(page).words
    for verdict in example_plan().search.verdicts:
        assert verdict.reason in words and verdict.layout.label() in words


def test_hostile_names_stay_text() -> None:
    checker = parse(render_page(hostile_plan()))
    assert [tag for tag, _ in checker.seen].count("script") == 3
    assert not any(name.startswith("on") for _, attributes in checker.seen for name in attributes)
    assert "img" not in [tag for tag, _ in checker.seen]
    assert any(HOSTILE in word for word in checker.words)


def test_embedded_data_is_json_again() -> None:
    found = re.search(
        r'<script type="application/json" id="timeline-data">(.*?)</script>', render_page(hostile_plan()), re.S
    )
    assert found and HOSTILE in json.loads(found[1])["labels"][0]


def test_page_of_one_stage_and_no_search() -> None:
    plan = example_plan()
    layers = {module.name: module.num_layers for module in plan.model.modules}
    stage = replace(plan.stages[0], layers=layers, first_layer=dict.fromkeys(layers, 0), recompute={})
    layout = replace(plan.layout, pipeline_size=1)
    us, _ = _step_us([stage], layout, 32)
    bare = replace(
        plan,
        layout=layout,
        cluster=replace(plan.cluster, num_nodes=1),
        stages=(stage,),
        memory=plan.memory[:1],
        step=replace(plan.step, pipeline_us=us, total_us=plan.step.total_us - plan.step.pipeline_us + us),
        baselines=(),
        alternatives=(),
        search=replace(plan.search, status=EDITED, verdicts=(), limits=(), relaxations=()),
    )
    bare.check()
    parse(render_page(bare))


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the page's script is not run")


def opened(page: str, folder: Path, *more: str) -> tuple[str, str]:
    """The start tag and all of the document after its scripts ran in a headless browser."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --disable-quic"
    done = subprocess.run(
        [
            str(CHROMIUM),
            *flags.split(),
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1600",
            *more,
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    start = re.search(r"<html[^>]*>", done.stdout)
    assert start, done.stdout[:300]
    return start[0], done.stdout


@needs_browser
@pytest.mark.parametrize("plan", [example_plan(), hostile_plan()], ids=["example", "hostile"])
def test_script_runs_without_error_in_a_browser(plan: Plan, tmp_path: Path) -> None:
    start, document = opened(render_page(plan), tmp_path)
    assert 'data-ready="yes"' in start
    assert "data-error" not in start, start
    drawn = re.search(r'data-drawn="(\d+)"', document)
    assert drawn and int(drawn[1]) == 8 * 32 * 2


USE = """
const say = (name, value) => { root.dataset[name] = value; };
$("search").value = "tp8 MBS2"; $("search").dispatchEvent(new Event("input"));
say("words", $("shown").textContent);
document.querySelector("[data-outcome=memory]").click();
say("both", $("shown").textContent);
$("search").value = ""; $("search").dispatchEvent(new Event("input"));
say("outcome", $("shown").textContent);
document.querySelectorAll("[data-phase]")[1].click();
say("warmup", $("detail").dataset.drawn);
$("closer").click();
say("closer", $("detail").dataset.drawn);
$("detail").dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
say("whole", $("detail").dataset.drawn);
const box = $("detail").getBoundingClientRect();
$("detail").dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 60, clientY: box.top + 30 }));
say("tip", tip.textContent);
const paper = css("--page"); $("theme").click(); say("theme", css("--page") !== paper);
"""


def without_policy(page: str) -> str:
    """The page of a test that adds a script of its own, which the page's policy refuses."""
    left, found = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert found == 1
    return left


@needs_browser
def test_filter_zoom_tooltip_and_theme_do_what_they_say(page: str, tmp_path: Path) -> None:
    start, _ = opened(without_policy(page).replace("</body>", f"<script>{USE}</script></body>"), tmp_path)
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', start))
    verdicts = example_plan().search.verdicts
    words = [v for v in verdicts if "TP8" in v.layout.label() and "MBS2" in v.layout.label()]
    assert "error" not in found
    assert found["words"] == f"{len(words)} shown"
    assert found["both"] == f"{sum(v.outcome == 'memory' for v in words)} shown"
    assert found["outcome"] == f"{sum(v.outcome == 'memory' for v in verdicts)} shown"
    assert 0 < int(found["closer"]) < int(found["warmup"]) < int(found["whole"]) == 8 * 32 * 2
    assert "Rank 0: image_encoder 0-25" in found["tip"] and "forward of microbatch 0" in found["tip"]
    assert found["theme"] == "true"


def test_the_policy_allows_the_pages_own_script_alone() -> None:
    page = render_page(example_plan())
    script = re.search(r"<script>(.*?)</script>", page, re.S)
    assert script is not None and page.count("<script") == 3
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "script-src 'unsafe-inline'" not in page


def test_a_memory_term_has_one_colour_whatever_else_a_page_shows() -> None:
    assert len({term_colour(name) for name in ("parameters", "gradients", "optimizer", "transient", "messages")}) == 5
    plan = example_plan()
    fewer = replace(plan, memory=tuple(replace(rank, terms=dict(list(rank.terms.items())[1:])) for rank in plan.memory))
    marks = [
        dict(re.findall(r'<li><i class="(c\d[^"]*)"></i>([a-z ]+)</li>', render_page(one))) for one in (plan, fewer)
    ]
    names = [{name: colour for colour, name in each.items()} for each in marks]
    assert names[1] and all(names[0][name] == colour for name, colour in names[1].items() if name in names[0])


def test_flags_to_paste_are_on_the_page() -> None:
    page = render_page(example_plan(), "flags of megatron-lm: --tensor-model-parallel-size 2 <x>")
    assert "--tensor-model-parallel-size 2 &lt;x&gt;" in page


_MEASURE = """
<script>addEventListener("load", () => setTimeout(() => {
  const language = document.getElementById("language");
  const seen = () => ({
    width: document.documentElement.scrollWidth,
    wide: [...document.querySelectorAll("main *")].filter(one =>
      one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll")).slice(0, 5)
      .map(one => one.tagName + "." + one.className),
    heading: document.querySelector("h2").textContent, error: document.documentElement.dataset.error || "",
  });
  const told = [seen()];
  language.click(); told.push(seen());
  if (!location.hash) { language.click(); told.push(seen()); }
  parent.postMessage({ name: window.name, told }, "*");
}, 300));</script>
"""
_COLLECT = """
<script>const told = {}; addEventListener("message", event => {
  told[event.data.name] = event.data.told; document.documentElement.dataset.told = JSON.stringify(told);
});</script>
"""


@needs_browser
@pytest.mark.parametrize("width", [420, 1400])
def test_no_page_is_wider_than_the_window_in_either_language(width: int, tmp_path: Path) -> None:
    """Every kind of page in a frame of that width: browsers do not make windows as narrow as a phone. With
    ``SCREENSHOTS`` set to a folder, a picture of all of them lies there."""
    folder = tmp_path / "inner"
    folder.mkdir()
    frames = ""
    for kind in KINDS:
        (folder / f"{kind}.html").write_text(
            without_policy(example_page(kind)).replace("</head>", _MEASURE + "</head>"), "utf-8"
        )
        frames += f'<iframe name="{kind}" src="inner/{kind}.html" width="{width}" height="2400"></iframe><br>'
    document = f"<html><head>{_COLLECT}</head><body>{frames}</body></html>"
    start, _ = opened(document, tmp_path, "--virtual-time-budget=6000")
    if "SCREENSHOTS" in os.environ:
        picture = Path(os.environ["SCREENSHOTS"]).resolve() / f"pages-{width}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        size = f"--window-size={width + 40},{2420 * len(KINDS)}"
        opened(document, tmp_path, "--virtual-time-budget=6000", size, f"--screenshot={picture}")
    told = re.search(r'data-told="([^"]*)"', start)
    assert told is not None, start
    found = json.loads(html.unescape(told[1]))
    assert sorted(found) == sorted(KINDS)
    for kind, (english, chinese, again) in found.items():
        for seen in (english, chinese):
            assert seen["error"] == "" and seen["width"] <= width, f"{kind}: {seen}"
            assert kind == "operators" or not seen["wide"], f"{kind}: {seen['wide']}"
        assert chinese["heading"] != english["heading"] == again["heading"], kind


@pytest.mark.parametrize("kind", KINDS)
def test_prose_of_every_page_has_a_translation(kind: str) -> None:
    page = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", example_page(kind), flags=re.DOTALL)
    prose = [one for one in texts_of(page) if re.search(r"[a-z]{3,} [a-z]{2,} [a-z]{2,}", one)]
    prose = [one for one in prose if not one.startswith(("mindspeed-autoparallel convert", "torchrun"))]
    assert prose
    assert [one for one in prose if in_chinese(one) is None] == []


def test_a_translation_fills_its_places_in_order_or_by_number() -> None:
    assert in_chinese("step") == "单步"
    assert in_chinese("2 is 5.0% slower, 3 is 50.0% slower") == "2 慢 5.0%，3 慢 50.0%"
    assert in_chinese("not proved: at most 8.7 % from the best possible, after 3.0 s") == (
        "未证明最优：3.0 s 后，距可能的最优至多 8.7 %"
    )
    assert in_chinese("no such text at all") is None
