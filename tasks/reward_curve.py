"""The reward curve as a small SVG without any library, as a data URI that both Prefect UIs show offline."""

import base64
from collections.abc import Sequence
from xml.sax.saxutils import escape

MOST_POINTS = 300
_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 32, 44
_INK, _GRID, _LINE = "#1f2937", "#d1d5db", "#2563eb"


def reward_curve_svg(run: str, rewards: Sequence[tuple[int, float]]) -> str:
    """Mean reward (0 to 1, or as far as it goes) by train step. `rewards` are (step, mean reward), by step."""
    points = list(rewards) or [(0, 0.0)]
    last_step = max(step for step, _ in points) or 1
    low, high = min(0.0, *(reward for _, reward in points)), max(1.0, *(reward for _, reward in points))

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last_step

    def y(reward: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (reward - low) / (high - low)

    ticks = [low + (high - low) * part / 4 for part in range(5)]
    lines = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="{_GRID}"/>'
        f'<text x="{_LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{t:.2f}</text>'
        for t in ticks
    ]
    steps = sorted({round(last_step * part / 5) for part in range(6)})
    labels = [f'<text x="{x(s):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{s}</text>' for s in steps]
    path = " ".join(f"{x(step):.1f},{y(reward):.1f}" for step, reward in points)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="{_INK}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(run)}: mean reward by train step</text>'
        f"{''.join(lines)}{''.join(labels)}"
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">train step</text>'
        f'<polyline fill="none" stroke="{_LINE}" stroke-width="2" points="{path}"/>'
        "</svg>"
    )


def thinned(rewards: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most so many points: neighbouring steps become their mean, at the last of them."""
    size = -(-len(rewards) // most)
    parts = [rewards[first : first + size] for first in range(0, len(rewards), max(1, size))]
    return [(part[-1][0], sum(reward for _, reward in part) / len(part)) for part in parts]


def data_uri(svg: str) -> str:
    """The SVG as a URL that needs no server."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
