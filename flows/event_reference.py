"""The tables of trace events and fields in the documentation, made from the schema."""

import re

import polars as pl

from storage.trace_schema import EVENTS, FIELDS, OBJECTS

_TABLES = re.compile(r"(<!-- events -->\n).*?(<!-- end events -->)", re.DOTALL)
_TYPES = {
    pl.String(): "text",
    pl.Int64(): "integer",
    pl.Float64(): "number",
    pl.Boolean(): "true or false",
    pl.List(pl.String()): "list of text",
    pl.List(pl.Int64()): "list of integers",
    pl.List(pl.Float64()): "list of numbers",
    pl.List(pl.List(pl.Int64())): "list of pairs of integers",
}


def event_tables() -> str:
    """Markdown: every event with its fields, and every field with its type."""
    lines = ["| Event | Meaning | Fields |", "|---|---|---|"]
    for name, event in EVENTS.items():
        fields = [*(f"`{field}`" for field in event.fields), *(f"`{field}`?" for field in event.optional)]
        lines.append(f"| `{name}` | {event.meaning} | {', '.join(fields) or '-'} |")
    lines += ["", "| Type | Fields |", "|---|---|"]
    named: dict[str, list[str]] = {}
    for field, dtype in FIELDS.items():
        named.setdefault("object, as JSON text" if field in OBJECTS else _TYPES[dtype], []).append(f"`{field}`")
    lines += [f"| {shown} | {', '.join(fields)} |" for shown, fields in named.items()]
    return "\n".join(lines) + "\n"


def filled_events(page: str) -> str:
    """The page with its tables of events brought up to date."""
    return _TABLES.sub(lambda match: match[1] + event_tables() + match[2], page)
