"""Reward and batch age by train step as a small SVG without any library, as a data URI that both Prefect UIs show
offline.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _PANEL = 720, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 32, 44
_INK, _GRID = "#1f2937", "#d1d5db"
_REWARD, _AGE = "#2563eb", "#b45309"
# A picture holds no more points than it has pixels to show them.
MOST_POINTS = 300

Points = Sequence[tuple[int, float]]


def reward_curve_svg(run: str, rewards: Points, ages: Points = ()) -> str:
    """Mean reward (0 to 1, or as far as it goes) and, if there are any, batch ages by train step; both by step."""
    panels = [_panel(f"{run}: mean reward by train step", rewards, _REWARD, top=0, least_high=1.0)]
    if ages:
        title = "batch age: train steps between a token's weights and its training, mean of the batch"
        panels.append(_panel(title, ages, _AGE, top=_PANEL, least_high=1.0))
    height = _PANEL * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{_INK}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(panels)}</svg>'
    )


def _panel(title: str, given: Points, colour: str, *, top: int, least_high: float) -> str:
    points = thinned(given) or [(0, 0.0)]
    last_step = max(step for step, _ in points) or 1
    low = -_round_above(max(0.0, *(-value for _, value in points)))
    high = _round_above(max(least_high, *(value for _, value in points)))

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last_step

    def y(value: float) -> float:
        return top + _PANEL - _BOTTOM - (_PANEL - _TOP - _BOTTOM) * (value - low) / (high - low)

    ticks = [low + (high - low) * part / 4 for part in range(5)]
    lines = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="{_GRID}"/>'
        f'<text x="{_LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{t:.2f}</text>'
        for t in ticks
    ]
    steps = sorted({round(last_step * part / 5) for part in range(6)})
    floor = top + _PANEL
    labels = [f'<text x="{x(s):.1f}" y="{floor - 24}" text-anchor="middle">{s}</text>' for s in steps]
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    dots = "".join(f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for s, v in points[-1:])
    return (
        f'<text x="{_LEFT}" y="{top + 20}" font-size="14">{escape(title)}</text>'
        f"{''.join(lines)}{''.join(labels)}"
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{floor - 6}" text-anchor="middle">train step</text>'
        f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>{dots}'
    )


def _round_above(value: float) -> float:
    """The next number whose quarters are easy to read."""
    if value <= 0.0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 4, 6, 8, 10) if power * digit >= value)


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most so many points: neighbouring steps become their mean, at the last of them."""
    size = -(-len(points) // most)
    parts = [points[first : first + size] for first in range(0, len(points), max(1, size))]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def by_step(values: Mapping[int, float]) -> list[tuple[int, float]]:
    """The points of a curve."""
    return sorted(values.items())


def data_uri(svg: str) -> str:
    """The SVG as a URL that needs no server."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
