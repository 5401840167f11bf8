"""The style sheet of the page, light and dark, with a colour for each phase."""

from __future__ import annotations

from typing import Final

from kvbaton.observe.timeline import PHASES

#: Okabe and Ito's colours, which people who see red and green alike can tell apart too.
_COLOURS: Final = {
    "queue": "#8c8c8c", "reserve": "#cc79a7", "prefill_queue": "#56b4e9", "prefill": "#0072b2", "receive": "#e69f00",
    "import": "#d55e00", "admit": "#f0e442", "decode": "#009e73", "retire": "#c9c9c9",
}  # fmt: skip
#: Those on which white text reads better than black.
_DARK: Final = ("prefill", "import", "decode")


def _painted(phase: str) -> str:
    ink = "#fff" if phase in _DARK else "#111"
    return f".p-{phase}{{fill:{_COLOURS[phase]};background:{_COLOURS[phase]}}}.on-{phase}{{fill:{ink}}}"


STYLE: Final = (
    """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--back:#fff;--card:#f6f8fa;--bad:#b3261e;
--chunk:#1b1f24;--bytes:#8250df}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9da7b3;--line:#30363d;--back:#0d1117;--card:#161b22;
--bad:#ff8a80;--chunk:#e6edf3;--bytes:#bc8cff}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:20px 20px 60px}
h1{font-size:24px;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:34px 0 6px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:16px 0 4px}
p{margin:4px 0 10px;color:var(--soft)}p b{color:var(--ink)}
svg{display:block;width:100%;overflow:visible}
svg text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin-top:12px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tile span,.tile small{display:block;color:var(--soft);font-size:12px}
.tile b{font-size:22px;font-variant-numeric:tabular-nums}
.tile.bad b,.bad{color:var(--bad)}svg .bad{fill:var(--bad)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;padding:0;margin:4px 0 10px;font-size:12px;
color:var(--soft)}
.legend b{color:var(--ink)}
.over{color:var(--soft);font-size:12px;letter-spacing:.06em;text-transform:uppercase}
.key{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.key.line{height:4px;background:var(--chunk);opacity:.75;vertical-align:3px}
.key.mark{width:2px;background:var(--ink);border-radius:0}
.fall{display:grid;grid-template-columns:minmax(48px,108px) 1fr}
.fall .labels text{fill:var(--soft);font-size:11px}.fall .labels .bad{fill:var(--bad)}
.rows g:hover rect{opacity:.7}
svg .tick{fill:var(--soft);font-size:11px}.grid{stroke:var(--line)}
.chunk{fill:var(--chunk);opacity:.75}.bytes{fill:var(--bytes)}
.first{stroke:var(--ink);stroke-width:2}
svg .cross{fill:var(--bad);font-weight:700}
.courses{display:grid;grid-template-columns:minmax(64px,108px) 1fr;gap:6px 0;margin:0 0 10px;font-size:12px}
.courses dt{color:var(--soft);align-self:center}.courses dd{margin:0}
.course{background:var(--card)}.course rect{shape-rendering:crispEdges}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;min-width:50%}
th,td{padding:4px 12px 4px 0;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums;
border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal}
th:first-child,td:first-child,th.wide{text-align:left}th.wide{padding-left:12px}
td.wide{white-space:normal;text-align:left;min-width:220px;padding-left:12px;overflow-wrap:anywhere}
summary{cursor:pointer;font-weight:600;margin:10px 0}
@media (max-width:640px){main{padding:12px}body{font-size:14px}}
@media print{section{break-inside:avoid}}
""".replace("\n", "")
    + "".join(map(_painted, PHASES))
)
