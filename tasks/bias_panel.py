"""Whether restarts change what is trained, as a plot of a report."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from storage.restart_bias import Comparison, Sample
from tasks.bias_table import BIAS, UNITS
from tasks.report_figures import Panel, styled
from tasks.report_style import COLOURS

_KINDS = (("interrupted", "lived through a restart", COLOURS[3]), ("others", "did not", COLOURS[0]))


def bias_panels(comparisons: Sequence[Comparison]) -> list[Panel]:
    """One plot, where anything lived through a restart."""
    told = [one for one in comparisons if one.interrupted is not None]
    if not told:
        return []
    figure = make_subplots(rows=1, cols=len(UNITS), horizontal_spacing=0.12)
    for column, measure in enumerate(UNITS, start=1):
        own = [one for one in told if one.measure == measure]
        for name, shown, colour in _KINDS:
            points = _points([one.level for one in own], [getattr(one, name) for one in own])
            marks: dict[str, Any] = {"color": colour, "size": 10}
            scatter = go.Scatter(
                **points, name=shown, mode="markers", marker=marks, legendgroup=name, showlegend=column == 1
            )
            figure.add_trace(scatter, row=1, col=column)
        figure.update_xaxes(title="recovery level", type="category", row=1, col=column)
        figure.update_yaxes(title=UNITS[measure], row=1, col=column)
    figure.update_layout(scattermode="group", scattergap=0.7)
    return [Panel("restart-bias", "Work that lived through a restart", BIAS, styled(figure, height=400))]


def _points(levels: Sequence[str], samples: Sequence[Sample | None]) -> dict[str, Any]:
    """The means with their intervals; a mean of one group has none."""
    found = [(level, sample) for level, sample in zip(levels, samples, strict=True) if sample is not None]
    halves = [0.0 if sample.high is None else sample.high - sample.mean for _, sample in found]
    return {
        "x": [level for level, _ in found],
        "y": [sample.mean for _, sample in found],
        "error_y": {"type": "data", "array": halves, "visible": True},
        "text": [f"{sample.groups} groups" for _, sample in found],
    }
