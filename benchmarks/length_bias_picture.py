"""The picture of `benchmarks.length_bias`: how much rarer than they should be rollouts of each length become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = {
    "no kill": "#9a9a9a",
    "prompt_group": "#b8860b",
    "sibling": "#c0392b",
    "turn": "#7d3c98",
    "prefix": "#1f6fb2",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """By length in tokens: the share of rollouts that are longer, against the share in the known distribution."""

    name: str
    lengths: Sequence[int]
    ratios: Sequence[float]


def draw(workloads: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """One panel for each workload. The same curves make the same file."""
    look = {"svg.hashsalt": "midflight", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    with rc_context(look):
        figure = Figure(figsize=(9.2, 3.6), layout="constrained")
        panels = figure.subplots(1, len(workloads), sharey=True)
        for panel, (title, curves) in zip(panels, workloads.items(), strict=True):
            for curve in curves:
                style = "--" if curve.name == "no kill" else "-"
                panel.plot(curve.lengths, curve.ratios, style, color=COLOURS[curve.name], label=curve.name, lw=1.8)
            panel.set_title(title)
            panel.set_xlabel("length, tokens")
            panel.set_ylim(0, 1.15)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(frameon=False, loc="lower left")
        panels[0].set_ylabel("rollouts longer than this,\nas a share of those there should be")
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
