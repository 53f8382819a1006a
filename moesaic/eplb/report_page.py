"""The HTML of `moesaic eplb report`: one file, nothing fetched, light and dark by the reader's setting."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#667;--line:#d8dce2;--card:#f5f6f8;--good:#1a7f37}
.s0{--c:#f7fbff}.s1{--c:#deebf7}.s2{--c:#c6dbef}.s3{--c:#9ecae1}.s4{--c:#6baed6}.s5{--c:#3182bd}.s6{--c:#08519c}
.s7{--c:#08306b}
.d0{--c:#2166ac}.d1{--c:#67a9cf}.d2{--c:#d1e5f0}.d3{--c:#f3f3f3}.d4{--c:#fddbc7}.d5{--c:#ef8a62}.d6{--c:#d6433b}
.d7{--c:#99000d}
@media (prefers-color-scheme:dark){
:root{--bg:#14171c;--fg:#e4e7eb;--dim:#9aa4b0;--line:#333a44;--card:#1c2129;--good:#56d364}
.s0{--c:#171b22}.s1{--c:#1d2b3a}.s2{--c:#1f3f5c}.s3{--c:#22577f}.s4{--c:#2f78ad}.s5{--c:#57a0d3}.s6{--c:#98c9ea}
.s7{--c:#e3f1fb}
.d0{--c:#6aaee0}.d1{--c:#3d7fb3}.d2{--c:#29445c}.d3{--c:#20252d}.d4{--c:#54372c}.d5{--c:#96503a}.d6{--c:#d8604f}
.d7{--c:#ff9a8a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:980px;padding:24px 16px 64px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 8px}h3{font-size:15px;margin:20px 0 6px}
p{margin:6px 0}.dim,.key{color:var(--dim);font-size:13px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--fg);font:11px system-ui,sans-serif}
svg path[class]{fill:var(--c)}
svg rect[fill="white"]{fill:var(--bg)}svg line[stroke="#ddd"]{stroke:var(--line)}
.key span{display:inline-block;margin-right:12px}
.key i{display:inline-block;width:12px;height:12px;margin-right:4px;vertical-align:-1px;background:var(--c);
border:1px solid var(--line)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:10px;margin:14px 0}
.cards div{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 12px}
.cards b{display:block;font-size:20px}.cards span{color:var(--dim);font-size:12px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:2px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
td:first-child,th:first-child{text-align:left}tr.best td{color:var(--good);font-weight:600}
"""


def page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """The whole file. sections are HTML already; title and subtitle are not."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="dim">{html.escape(subtitle)}</p>'
        + "\n".join(sections)
        + "</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    return f"<h2>{html.escape(title)}</h2>" + "\n".join(parts)


def part(title: str, *parts: str) -> str:
    return f"<h3>{html.escape(title)}</h3>" + "\n".join(parts)


def note(text: str) -> str:
    return f'<p class="dim">{html.escape(text)}</p>'


def cards(items: Sequence[tuple[str, str]]) -> str:
    """(number, what it is), as boxes."""
    boxes = "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for value, name in items)
    return f'<div class="cards">{boxes}</div>'


def table(rows: Sequence[Mapping[str, Any]], best: int = -1) -> str:
    """A column for every key that any row has a plain value for; row `best` stands out."""
    keys = list(dict.fromkeys(key for row in rows for key, value in row.items() if _is_plain(value)))
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    head = "".join(f"<th>{html.escape(key.replace('_', ' '))}</th>" for key in keys)
    body = "".join(
        f"<tr{' class=best' if index == best else ''}>"
        + "".join(f"<td>{html.escape(number(row.get(key)))}</td>" for key in keys)
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def number(value: Any) -> str:
    """A value as people read it."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
