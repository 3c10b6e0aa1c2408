"""The page's style sheet: light, dark (the system's choice or the button's) and print."""

_LIGHT = """
  --page: #f6f6f3; --card: #ffffff; --ink: #161613; --soft: #5b5a55; --line: #deddd6; --idle: #eceae4;
  --good: #0b6e3a; --good-bg: #e0f3e7; --warn: #7a4b00; --warn-bg: #fdf0d2; --bad: #a11d1d; --accent: #1f5fae;
  --forward: #2467b8; --backward: #c64e1c; --on-bar: #ffffff;
  --c0: #2a78d6; --c1: #eb6834; --c2: #1baf7a; --c3: #8a5cd1; --c4: #eda100; --c5: #d64f86; --c6: #3d8f2f;
  --c7: #7b8794;
"""
_DARK = """
  --page: #121211; --card: #1c1c1a; --ink: #f2f1ec; --soft: #b0aea5; --line: #383731; --idle: #2b2a27;
  --good: #7fdca5; --good-bg: #15351f; --warn: #f4cc76; --warn-bg: #3a2d10; --bad: #ff9a94; --accent: #8abaf5;
  --forward: #4a90e8; --backward: #e0703c; --on-bar: #10100f;
  --c0: #4a90e8; --c1: #e0703c; --c2: #27a578; --c3: #a98bea; --c4: #cf9416; --c5: #dd6a9b; --c6: #5fa84e;
  --c7: #8b96a3;
"""
NUM_COLOURS = 8
"""Colours of categories, told apart also with red-green blindness; beyond them a hatch is added."""

CSS = (
    ":root {" + _LIGHT + "color-scheme: light; }\n"
    "@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) {" + _DARK + "color-scheme: dark; } }\n"
    ":root[data-theme=dark] {"
    + _DARK
    + "color-scheme: dark; }\n"
    + "".join(f".c{i} {{ background-color: var(--c{i}); }}\n" for i in range(NUM_COLOURS))
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
header { display: flex; gap: 16px; align-items: flex-start; justify-content: space-between; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 2px; letter-spacing: -.005em; }
h3 { font-size: 14px; margin: 18px 0 6px; }
p { margin: 0 0 10px; max-width: 90ch; }
.soft, .sub, footer { color: var(--soft); }
.sub { font-size: 13.5px; margin-bottom: 14px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px;
  margin-top: 18px; }
nav { position: sticky; top: 0; z-index: 5; background: var(--page); padding: 10px 0; margin-top: 14px;
  font-size: 13.5px;
  display: flex; gap: 4px 18px; flex-wrap: wrap; border-bottom: 1px solid var(--line); }
section { scroll-margin-top: 56px; }
a { color: var(--accent); text-underline-offset: 3px; } nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
button, input { font: inherit; font-size: 13px; color: var(--ink); background: var(--card);
  border: 1px solid var(--line);
  border-radius: 8px; padding: 4px 11px; }
button { cursor: pointer; white-space: nowrap; } button:hover { border-color: var(--soft); }
button[aria-pressed=true] { background: var(--ink); color: var(--card); border-color: var(--ink); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.tile b { display: block; font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -.015em; }
.tile span { font-size: 13px; color: var(--soft); } .tile .label { color: var(--soft); font-size: 12.5px;
  display: block; }
.badge { display: inline-block; border-radius: 99px; padding: 2px 11px; font-size: 13px; font-weight: 600; }
.good { color: var(--good); } .badge.good { background: var(--good-bg); } .bad { color: var(--bad); }
.badge.warn { color: var(--warn); background: var(--warn-bg); }
.warnings { margin: 14px 0 0; padding: 10px 16px 10px 34px; background: var(--warn-bg); color: var(--warn);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; vertical-align: bottom; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); } tr:last-child > td { border-bottom: 0; }
td { vertical-align: middle; } td.n, th.n { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; }
.cell { white-space: nowrap; } .cell small { color: var(--soft); }
.mini { display: flex; height: 7px; border-radius: 3px; overflow: hidden; margin-top: 3px; gap: 1px; }
.hatch { background-image: repeating-linear-gradient(135deg, transparent 0 3px, var(--card) 3px 4.5px); }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 7px 12px; align-items: center;
  font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
.track { position: relative; height: 20px; background: var(--idle); border-radius: 4px; }
.fill { display: flex; height: 100%; gap: 2px; overflow: hidden; border-radius: 4px; } .fill > i { display: block;
  min-width: 1px; }
.thin .track { height: 15px; } .thin { gap: 4px 12px; }
.limit { position: absolute; top: -4px; bottom: -4px; width: 0; border-left: 2px dashed var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 0 0 12px; padding: 0;
  list-style: none; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.legend .mark { width: 0; height: 14px; border-left: 2px dashed var(--ink); border-radius: 0; }
.idle { background: var(--idle); } .forward { background: var(--forward); } .backward { background: var(--backward); }
.tools { display: flex; flex-wrap: wrap; gap: 6px; margin: 0 0 10px; align-items: center; } .tools .gap { flex: 1; }
canvas { display: block; width: 100%; touch-action: pan-y; border-radius: 6px; } #overview { cursor: pointer;
  margin-bottom: 8px; }
#detail { cursor: grab; } #detail:active { cursor: grabbing; }
details { margin-top: 12px; } summary { cursor: pointer; padding: 4px 0; }
summary .n { font-variant-numeric: tabular-nums; }
ul.plain { margin: 0; padding-left: 20px; } ul.plain li { margin: 3px 0; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 8px 36px; }
.mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 12.5px;
  overflow-wrap: anywhere; max-width: none; }
.group { border-top: 1px solid var(--line); margin: 0; padding: 5px 0; }
.group .scroll { max-height: 380px; overflow: auto; }
#search { min-width: 260px; flex: 1; max-width: 420px; }
#tip { position: fixed; z-index: 9; pointer-events: none; background: var(--ink); color: var(--card);
  font-size: 12.5px; padding: 6px 10px;
  border-radius: 7px; max-width: 340px; white-space: pre-line; visibility: hidden; }
footer { font-size: 12.5px; margin-top: 22px; }
@media (max-width: 640px) { main { padding: 18px 12px; } section { padding: 16px 14px; }
.bars { grid-template-columns: max-content 1fr; }
  .bars > :nth-child(3n) { grid-column: 2; margin-top: -6px; } }
@media print {
  :root, :root:not([data-theme=light]) {"""
    + _LIGHT
    + """color-scheme: light; --page: #fff; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  nav, .tools, #theme, #tip { display: none !important; }
  section, .tile { break-inside: avoid; } #ruled-out, #alternatives { break-inside: auto; }
tr { break-inside: avoid; }
  main { padding: 0; max-width: none; } body { font-size: 12px; } .group .scroll, .scroll { max-height: none;
  overflow: visible; }
}
"""
)
