"""The style of the report's page: light and dark, wide and narrow, on paper."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1c2024; --muted: #6b7178; --line:
  #e1e3e6; --grid: #eceef0; --code: #f4f5f6; --good: #1a7f4b; --bad: #c0362c; --middling: #9a6700; --before:
  #a3abb4; --series-1: #2f6fd0; --series-2: #e08a2b; --series-3: #2a9d78; --series-4: #8a63c9;
  --series-5: #c0486f; --series-6: #4d8f9c; --series-7: #8c6d3f; --series-8: #5c6670; --add: #e3f4ea; --del: #fbe7e5; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1b1f23; --ink: #e6e8ea; --muted:
  #969da5; --line: #2e3338; --grid: #282d32; --code: #15181b; --good: #4cc38a; --bad: #f2766b; --middling:
  #e0af4f; --before: #6f7880; --series-1: #6ea8ff; --series-2: #f0a75a; --series-3: #55c9a2; --series-4:
  #b79af0; --series-5: #ef88a8; --series-6: #7cc3d0; --series-7: #cbab78; --series-8: #a9b3bd; --add: #173226; --del: #3a1f1d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial,
  sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 52px 0 14px; padding-bottom: 6px; border-bottom: 1px solid var(--line); }
h3 { font-size: 15px; margin: 0 0 8px; }
h4 { font-size: 13px; margin: 0 0 4px; }
.sub, .fine, .missing { color: var(--muted); }
.sub { margin: 4px 0 24px; }
.fine { font-size: 13px; max-width: 78ch; margin: 12px 0; }
.missing, .note { background: var(--card); border: 1px solid var(--line); border-left: 3px solid
  var(--middling); border-radius: 4px; padding: 10px 14px; margin: 12px 0; }
.phases { list-style: none; display: flex; flex-wrap: wrap; gap: 10px; margin: 0; padding: 0; }
.phases li { flex: 1 1 170px; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 9px 12px; border-top: 3px solid var(--before); font-size: 13px; }
.phases li.done { border-top-color: var(--good); }
.phases b, .phases span { display: block; }
.phases span { color: var(--muted); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); font-weight: 400;
  vertical-align: baseline; }
thead th { color: var(--muted); font-size: 12.5px; border-bottom-color: var(--muted); white-space: nowrap;
  vertical-align: bottom; }
.n { text-align: right; white-space: nowrap; padding-left: 8px; }
.group { text-align: center; border-bottom-color: var(--line); }
.gain { color: var(--good); } .loss { color: var(--bad); } .muted, .none { color: var(--muted); }
.name { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size:
  0.92em; overflow-wrap: anywhere; }
sub { line-height: 0; font-size: 0.75em; }
.two { display: grid; grid-template-columns: minmax(0, 1.12fr) minmax(0, 1fr); gap: 36px; align-items:
  start; }
.two > table { width: 100%; }
.small { width: 100%; font-size: 13px; margin-top: 14px; }
.wide { width: 100%; }
.scroll { overflow-x: auto; }
.bars { width: 130px; padding-right: 0; }
.pair { width: 130px; height: 15px; display: block; }
.key i { display: inline-block; width: 11px; height: 7px; border-radius: 1.5px; margin: 0 5px 1px 12px; }
.key i:first-child { margin-left: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: 16px;
  }
.charts > .chart { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 12px
  10px 8px; }
.chart { width: 100%; height: auto; display: block; font-family: inherit; font-variant-numeric:
  tabular-nums; }
.skills td { vertical-align: top; }
.skill .name { display: block; font-weight: 600; } .what { display: block; }
details { font-size: 13px; margin: 2px 0; } summary { color: var(--muted); cursor: pointer; }
.badge { display: inline-block; font-size: 12px; line-height: 18px; padding: 0 8px; border-radius: 9px;
  border: 1px solid; white-space: nowrap; }
.badge.good { color: var(--good); } .badge.bad { color: var(--bad); } .badge.middling { color:
  var(--middling); }
.chip { font-size: 12px; font-weight: 400; background: var(--code); border: 1px solid var(--line);
  border-radius: 4px; padding: 0 6px; margin-left: 8px; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 14px 18px;
  margin: 16px 0; }
article small { color: var(--muted); font-weight: 400; font-size: 13px; }
.why { color: var(--muted); font-size: 13px; font-weight: 600; }
.verdict { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 12px; margin: 14px 0 6px; }
.verdict .rest { color: var(--muted); font-size: 13px; margin-left: auto; }
pre { background: var(--code); border: 1px solid var(--line); border-radius: 4px; padding: 10px 12px;
  margin: 4px 0; overflow: auto; max-height: 560px; font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo,
  Consolas, "DejaVu Sans Mono", monospace; tab-size: 4; }
blockquote { margin: 6px 0 0; padding: 4px 12px; border-left: 3px solid var(--line); color: var(--muted);
  font-size: 13.5px; white-space: pre-wrap; overflow-wrap: anywhere; }
blockquote b { font-weight: 600; }
.defs { columns: 3 270px; column-gap: 28px; margin: 12px 0 20px; }
dl { break-inside: avoid; margin: 0 0 18px; font-size: 13px; }
dl div { display: flex; justify-content: space-between; gap: 14px; border-bottom: 1px solid var(--grid);
  padding: 2px 0; }
dt { color: var(--muted); white-space: nowrap; } dd { margin: 0; text-align: right; font-variant-numeric:
  tabular-nums; overflow-wrap: anywhere; min-width: 0; }
dl .long { display: block; } .long dd { text-align: left; }
@media (max-width: 760px) { .two { grid-template-columns: minmax(0, 1fr); } main { padding: 24px 14px 60px;
  } }
@media print { pre { max-height: none; } article, .charts .chart { break-inside: avoid; } }
a { color: var(--series-1); }
:focus-visible { outline: 2px solid var(--series-1); outline-offset: 2px; border-radius: 3px; }
.skip { position: absolute; left: -9999px; } .skip:focus { left: 12px; top: 12px; background: var(--card); padding: 8px 14px; z-index: 2; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 0 0 18px; padding: 8px 0; border-block: 1px solid var(--line); font-size: 13.5px; }
nav a { text-decoration: none; } nav a:hover { text-decoration: underline; }
section { scroll-margin-top: 12px; }
ul.notes { margin: 0; padding-left: 18px; }
caption { text-align: left; font-size: 13.5px; font-weight: 600; padding: 0 0 4px; }
td small { display: block; color: var(--muted); font-size: 11.5px; line-height: 1.3; white-space: nowrap; }
.scroll { margin: 10px 0 18px; } .scroll:focus-visible { outline-offset: -2px; }
tbody th[scope="row"] { overflow-wrap: anywhere; min-width: 9em; padding-right: 18px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 12px 12px 8px; min-width: 0; }
figure .scroll { max-height: 360px; overflow: auto; }
figcaption { font-size: 12.5px; color: var(--muted); margin: 4px 0 2px; }
.charts { align-items: start; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; } .legend span { display: inline-flex; align-items: center; gap: 6px;
  overflow-wrap: anywhere; min-width: 0; }
.swatch { flex: none; }
.hatched { width: 12px; height: 9px; border: 1px solid var(--muted); background: repeating-linear-gradient(45deg, var(--muted) 0 1.5px,
  transparent 1.5px 4px); }
.odd { color: var(--bad); font-size: 0.85em; border: 1px solid; border-radius: 3px; padding: 0 2px; margin: 0 1px; }
pre, blockquote, .name { unicode-bidi: isolate; direction: ltr; }
.turn { border-top: 1px solid var(--line); margin-top: 14px; padding-top: 10px; } .turn h4 { font-size: 14px; }
.diff { padding: 6px 0; } .diff span.l { display: block; padding: 0 12px; white-space: pre; min-width: max-content; }
.diff .add { background: var(--add); } .diff .del { background: var(--del); } .diff .at { color: var(--muted); }
.diff b { display: inline-block; width: 1.4em; font-weight: 600; user-select: none; }
.said { margin: 4px 0 0; }
.chooser { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(190px, 100%), 1fr)); gap: 10px 14px; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: 12px 14px; }
.chooser label { font-size: 12.5px; color: var(--muted); display: block; min-width: 0; }
.chooser select, .chooser input { width: 100%; margin-top: 2px; padding: 6px 8px; font: inherit; font-size: 14px; color: var(--ink);
  background: var(--page); border: 1px solid var(--line); border-radius: 4px; }
.chooser .which { grid-column: 1 / -1; display: flex; gap: 8px; align-items: end; } .which label { flex: 1; }
.chooser button { padding: 6px 12px; font: inherit; font-size: 14px; color: var(--ink); background: var(--page); border: 1px solid var(--line);
  border-radius: 4px; cursor: pointer; white-space: nowrap; } .chooser button:disabled { color: var(--muted); cursor: default; }
@media (max-width: 560px) { .chart text { font-size: 12.5px; } .chart text[font-weight="600"] { font-size: 14px; } .charts { gap: 12px; }
  article { padding: 12px; } figure { padding: 10px 8px 6px; } h2 { margin-top: 40px; } .verdict .rest { margin-left: 0; }
  .two table { display: block; overflow-x: auto; font-size: 13px; } .chooser .which { flex-wrap: wrap; } .which label { flex-basis: 100%; } }
"""
