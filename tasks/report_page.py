"""A report as one HTML file that needs nothing else: no network, no other file."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.io as pio
from plotly.offline import get_plotlyjs

from tasks.report_figures import Panel
from tasks.report_tables import ReportTable

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #ffffff; margin: 0 auto; max-width: 1080px;
  padding: 24px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 19px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; color: #4b5563; max-width: 80ch; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0; display: block;
  overflow-x: auto; }
th, td { padding: 4px 12px; border-bottom: 1px solid #e5e7eb; text-align: right; vertical-align: bottom; }
td { white-space: nowrap; }
th { font-weight: 600; color: #374151; background: #f9fafb; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
.problem { background: #fef2f2; border-left: 4px solid #d55e00; padding: 8px 16px; color: #7f1d1d; }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.fact { border: 1px solid #e5e7eb; border-radius: 8px; padding: 8px 16px; }
.fact b { display: block; font-size: 20px; } .fact span { color: #4b5563; font-size: 13px; }
"""
_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}


def report_page(
    run: str, where: str, panels: Iterable[Panel], tables: Sequence[ReportTable], problems: Sequence[str]
) -> str:
    """The page of a run. `where` names the store; `problems` are those of the audit, shown first."""
    title = f"Midflight report: {run}"
    facts = next((table.rows[0] for table in tables if table.key == "summary"), {})
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Read from the trace and the manifests in {escape(where)}.</p>",
        *(f'<p class="problem">{escape(problem)}</p>' for problem in problems),
        _facts(facts),
    ]
    by_key = {table.key: table for table in tables if table.key != "summary"}
    for panel in panels:
        body += [f"<h2>{escape(panel.title)}</h2>", f"<p>{escape(panel.caption)}</p>", _plot(panel)]
        if (table := by_key.pop(panel.key, None)) is not None:
            body.append(_table(table, with_title=False, with_note=table.note != panel.caption))
    body += [_table(table, with_title=True, with_note=True) for table in by_key.values()]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    script = f"<script>{get_plotlyjs()}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{script}</head><body>{"".join(body)}</body></html>\n'


def _plot(panel: Panel) -> str:
    height = f"{panel.figure.layout.height}px"
    options: dict[str, Any] = {"full_html": False, "include_plotlyjs": False, "config": _CONFIG}
    return str(pio.to_html(panel.figure, **options, div_id=f"plot-{panel.key}", default_height=height))


def _facts(facts: Mapping[str, Any]) -> str:
    cards = (
        f'<div class="fact"><b>{_shown(value)}</b><span>{escape(name)}</span></div>' for name, value in facts.items()
    )
    return f'<div class="facts">{"".join(cards)}</div>'


def _table(table: ReportTable, *, with_title: bool, with_note: bool) -> str:
    columns = list(table.rows[0])
    texts = {name for name in columns if any(isinstance(row[name], str) and row[name] for row in table.rows)}
    head = "".join(f"<th{_class(name, texts)}>{escape(name)}</th>" for name in columns)
    lines = ("".join(f"<td{_class(name, texts)}>{_shown(row[name])}</td>" for name in columns) for row in table.rows)
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    title = f"<h2>{escape(table.title)}</h2>" if with_title else ""
    note = f"<p>{escape(table.note)}</p>" if table.note and with_note else ""
    return f"{title}{note}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _class(name: str, texts: set[str]) -> str:
    return ' class="text"' if name in texts else ""


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return escape(str(value))
