"""How the report looks: on screens of any width, light or dark, and on paper. Nothing is loaded from anywhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #14140f; --soft: #52514c; --faint: #6d6b64; --rule: #e2e1da; --grid: #ecebe5;
  --link: #1c5cab; --stored: #2a78d6; --gap: #d03b3b; --good: #0b7a0b; --good-back: #e8f5e6;
  --look: #8a5200; --look-back: #fdf1da; --code: #f1f0ea; --hover: rgba(20, 20, 15, .07);
  --k0: #2a78d6; --k1: #eb6834; --k2: #1baf7a; --k3: #eda100; --k4: #e87ba4; --k5: #008300; --k6: #4a3aa7;
  --k7: #e34948; --k8: #a09e96;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #0e0e0d; --card: #1a1a18; --ink: #f4f3ee; --soft: #c3c2b7; --faint: #a09e95; --rule: #34332f;
    --grid: #2a2a27;
    --link: #86b6ef; --stored: #3987e5; --gap: #e66767; --good: #5fc75f; --good-back: #14260f;
    --look: #f0b64b; --look-back: #2d220c; --code: #262622; --hover: rgba(255, 255, 255, .09);
    --k0: #3987e5; --k1: #d95926; --k2: #199e70; --k3: #c98500; --k4: #d55181; --k5: #2f9a2f; --k6: #9085e9;
    --k7: #e66767; --k8: #7c7a73;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
}
main, header.top, footer { max-width: 1120px; margin: 0 auto; padding: 0 20px; }
header.top { padding-top: 28px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; line-height: 1.3; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 26px 0 4px; }
p { margin: 0 0 10px; max-width: 78ch; }
a { color: var(--link); }
code {
  font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere;
}
pre {
  background: var(--code); border-radius: 6px; padding: 10px 12px; margin: 8px 0 14px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; line-height: 1.45;
}
.eyebrow { color: var(--faint); margin: 0 0 4px; font-size: 13px; }
.intro, .note { color: var(--soft); }
.note { font-size: 13.5px; }
nav { margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
dl.head { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 10px 0 0; font-size: 14px; }
dl.head dt { color: var(--faint); }
dl.head dd { margin: 0; overflow-wrap: anywhere; }
section {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 20px 22px; margin: 18px 0;
}
.verdict { border-left-width: 6px; display: grid; grid-template-columns: auto 1fr; gap: 4px 14px; }
.verdict .icon {
  width: 34px; height: 34px; border-radius: 50%; display: grid; place-items: center; font-size: 20px; font-weight: 700;
  color: var(--card);
}
.verdict h2 { font-size: 21px; margin: 2px 0 0; }
.verdict .more { grid-column: 2; color: var(--soft); }
.verdict .more p:last-child { margin-bottom: 0; }
.good { background: var(--good-back); border-color: var(--good); }
.good .icon { background: var(--good); }
.look { background: var(--look-back); border-color: var(--look); }
.look .icon { background: var(--look); }
ul.findings { grid-column: 2; list-style: none; margin: 8px 0 0; padding: 0; }
ul.findings li {
  padding: 7px 0; border-top: 1px solid var(--rule); display: grid; grid-template-columns: 3.6em 1fr;
  overflow-wrap: anywhere;
}
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(196px, 1fr)); gap: 12px; margin: 18px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 16px; }
.tile .label { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 23px; font-weight: 600; line-height: 1.25; overflow-wrap: anywhere; }
.tile .value.small { font-size: 16px; padding: 4px 0 3px; }
.tile .note { color: var(--faint); font-size: 12.5px; line-height: 1.35; }
.legend {
  list-style: none; margin: 4px 0 8px; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px;
}
.legend li { display: flex; align-items: center; gap: 6px; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 32px; }
.charts h3 { margin-top: 14px; }
.swatch { width: 11px; height: 11px; border-radius: 3px; flex: none; display: inline-block; }
td .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 32px; }
.charts h3 { margin-top: 14px; }
.swatch { margin-right: 7px; }
.plot { display: grid; grid-template-columns: 62px 1fr; margin: 10px 0 6px; }
.plot .y { position: relative; height: 190px; font-size: 12px; color: var(--faint); }
.plot .y span { position: absolute; right: 8px; transform: translateY(50%); white-space: nowrap; }
.plot .canvas { height: 190px; border-bottom: 1px solid var(--faint); }
.plot .x { grid-column: 2; }
.x { position: relative; height: 24px; font-size: 12px; color: var(--faint); }
.x span { position: absolute; padding: 3px 0 0 5px; border-left: 1px solid var(--faint); white-space: nowrap; }
.x .end { right: 0; border-left: 0; border-right: 1px solid var(--faint); padding: 3px 5px 0 0; }
.x .watermark { color: var(--ink); border-color: var(--ink); border-left-width: 2px; top: 20px; }
.x .watermark.flip {
  transform: translateX(-100%); border-left: 0; border-right: 2px solid var(--ink); padding: 3px 5px 0 0;
}
.strip { margin: 12px 0 26px; }
.strip .canvas { height: 54px; }
.strip .canvas.whole { height: 38px; }
svg { display: block; shape-rendering: crispEdges; width: 100%; height: 100%; overflow: visible; }
.grid { stroke: var(--grid); stroke-width: 1; vector-effect: non-scaling-stroke; }
.hit { fill: transparent; }
g:hover > .hit { fill: var(--hover); }
.stored { fill: var(--stored); background: var(--stored); }
.gap { fill: var(--gap); background: var(--gap); }
.k0 { fill: var(--k0); background: var(--k0); } .k1 { fill: var(--k1); background: var(--k1); }
.k2 { fill: var(--k2); background: var(--k2); } .k3 { fill: var(--k3); background: var(--k3); }
.k4 { fill: var(--k4); background: var(--k4); } .k5 { fill: var(--k5); background: var(--k5); }
.k6 { fill: var(--k6); background: var(--k6); } .k7 { fill: var(--k7); background: var(--k7); }
.k8 { fill: var(--k8); background: var(--k8); }
.q0 { fill: var(--k1); background: var(--k1); }
.w0 { fill: var(--ink); background: var(--ink); } .w1 { fill: var(--k0); background: var(--k0); }
.w2 { fill: var(--k8); background: var(--k8); }
.scroll { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; line-height: 1.4; }
caption { text-align: left; color: var(--soft); padding: 0 0 6px; font-size: 13.5px; }
th {
  text-align: left; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--faint); vertical-align: bottom;
}
th, td { padding: 5px 14px 5px 0; }
th:last-child, td:last-child { padding-right: 0; }
td { border-bottom: 1px solid var(--rule); vertical-align: top; overflow-wrap: anywhere; min-width: 4.5em; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.w { min-width: 13em; }
th.n { white-space: normal; }
.t { white-space: nowrap; font-variant-numeric: tabular-nums; }
.bar { width: 18%; min-width: 90px; }
.bar span {
  display: block; height: 11px; margin-top: 4px; border-radius: 0 3px 3px 0; background: var(--k0); min-width: 2px;
}
.none { font-style: italic; color: var(--soft); }
dl.words { display: grid; grid-template-columns: max-content 1fr; gap: 6px 18px; margin: 8px 0 0; }
dl.words dt { font-weight: 600; }
dl.words dd { margin: 0; color: var(--soft); max-width: 80ch; }
footer { color: var(--faint); font-size: 13px; padding-bottom: 36px; }
@media (max-width: 640px) {
  main, header.top, footer { padding-left: 12px; padding-right: 12px; }
  section { padding: 16px 14px; border-radius: 8px; }
  h1 { font-size: 23px; }
  .verdict { grid-template-columns: 1fr; }
  .verdict .more, ul.findings { grid-column: 1; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tile { padding: 10px 12px; }
  .tile .value { font-size: 19px; }
  .plot { grid-template-columns: 52px 1fr; }
  .x .alternate { display: none; }
  dl.words, dl.head { grid-template-columns: 1fr; gap: 0; }
  dl.words dd, dl.head dd { margin-bottom: 8px; }
}
@media print {
  body { background: #ffffff; font-size: 11pt; }
  section, .tile { border-color: #c0c0ba; }
  .verdict, .tile, .plot, .strip, tr { break-inside: avoid; }
  h2, h3, .legend, caption { break-after: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 9pt; }
  th, td { padding-right: 8px; }
  nav { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
