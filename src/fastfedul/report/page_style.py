"""How the page looks: on a phone first, wider where there is room."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1f2933; --soft: #52606d; --page: #f4f6f8; --card: #ffffff;
  --line: #dde2e8; --accent: #0072b2; --attack: #b34700;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6eaee; --soft: #a3afba; --page: #14191e; --card: #1e252c;
    --line: #343e48; --accent: #6cb8e6; --attack: #f0965a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100%;
}
header, main, footer { max-width: 68rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 2rem; }
h1 { margin: 0 0 .8rem; font-size: 1.65rem; line-height: 1.2; text-wrap: balance; }
h2 { margin: 2.4rem 0 .8rem; font-size: 1.25rem; }
h3 { margin: 0 0 .6rem; font-size: 1rem; }
p { margin: 0 0 .7rem; max-width: 46rem; }
.summary { font-size: 1.06rem; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: 1rem;
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption {
  text-align: left; color: var(--soft); font-size: .88rem; padding-bottom: .5rem;
}
th, td {
  padding: .55rem .8rem .55rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line);
}
tbody tr:last-child > * { border-bottom: 0; padding-bottom: .1rem; }
th:last-child, td:last-child { padding-right: 0; }
thead th {
  color: var(--soft); font-size: .88rem; font-weight: 600; overflow-wrap: normal;
}
tbody th { font-weight: 600; min-width: 4.6rem; overflow-wrap: break-word; }
.numbers thead th { white-space: nowrap; }
.numbers td { white-space: nowrap; }
.numbers th[scope=row] { min-width: 7rem; }
.value { display: block; font-size: 1.15rem; font-weight: 650; white-space: nowrap; }
.value.main { color: var(--accent); }
.value.attack { color: var(--attack); }
.count {
  display: block; color: var(--soft); font-size: .84rem; font-weight: 400;
  line-height: 1.4;
}
td .count { white-space: nowrap; }
.charts { column-gap: 1rem; }
.charts figure { break-inside: avoid; margin-bottom: 1rem; }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--soft); font-size: .92rem; margin-top: .6rem; }
.chart { background: #fff; border-radius: .4rem; }
@media (prefers-color-scheme: dark) { .chart { padding: .3rem; } }
.chart svg {
  display: block; width: 100%; max-width: 30rem; height: auto; margin: 0 auto;
}
.chart svg text {
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important;
}
.examples {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(5.5rem, 1fr));
  gap: 1rem; list-style: none; margin: 0; padding: 0;
}
.examples img {
  display: block; width: 100%; height: auto; image-rendering: pixelated;
  border: 1px solid var(--line); border-radius: .3rem; background: #fff;
}
.examples figcaption { margin-top: .3rem; font-size: .86rem; line-height: 1.35; }
dl { margin: 0; display: grid; grid-template-columns: minmax(7rem, 12rem) 1fr; }
.terms { margin-top: 1rem; font-size: .9rem; color: var(--soft); }
.terms > * { border: 0; padding-top: .1rem; padding-bottom: .1rem; }
.terms dt { font-weight: 600; }
dt, dd {
  margin: 0; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line);
}
dl > :nth-last-child(-n+2) { border-bottom: 0; }
dt { color: var(--soft); }
pre {
  margin: 0; padding: 1rem; max-height: 24rem; overflow: auto; white-space: pre-wrap;
  font: .88rem/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
.limits { padding-left: 2rem; margin: 0; }
.limits li { margin-bottom: .5rem; max-width: 46rem; }
footer { padding: 2rem 1rem; color: var(--soft); font-size: .86rem; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (min-width: 56rem) {
  h1 { font-size: 2.1rem; }
  .charts { columns: 2; }
}
@media (max-width: 30rem) {
  header, main, footer { padding-left: .75rem; padding-right: .75rem; }
  .card { padding: .75rem; }
  figure.card { padding: .75rem .5rem; }
  .plain th, .plain td { padding-right: .5rem; }
  .plain .value { font-size: 1rem; }
  .plain .count { font-size: .76rem; }
  .plain { font-size: .92rem; }
  .terms { display: block; }
  .terms dd { margin-bottom: .5rem; }
}
@media print {
  :root { --page: #fff; }
  .card, figure { break-inside: avoid; }
}
"""
