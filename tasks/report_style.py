"""Colours of the plots of a report, and how many points a plot holds."""

from collections.abc import Mapping

import polars as pl

from storage.analytics.group_time import STAGES

# Okabe and Ito: told apart by people who see few colours, and in grey.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c8c8c")
STAGE_COLOURS: Mapping[str, str] = dict(
    zip(STAGES, ("#8c8c8c", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#e69f00"), strict=True)
)
# What a stop costs, in the columns of `storage.analytics.stops`: words with the unit, and colour.
STOP_COSTS: Mapping[str, tuple[str, str]] = {
    "thrown_away_s": ("thrown away, attempt s", "#d55e00"),
    "redone_s": ("redone, attempt s", "#e69f00"),
    "lost_s": ("between cut and stop, s", "#cc79a7"),
    "down_s": ("down, s", "#8c8c8c"),
    "retrained_s": ("trained again, s", "#0072b2"),
}
MOST_BARS = 80


def bucketed(frame: pl.DataFrame, most: int) -> pl.DataFrame:
    """At most so many rows: neighbouring steps become their mean, at the last of them."""
    size = -(-frame.height // most)
    if size <= 1:
        return frame
    numbered = frame.with_row_index("row").with_columns(pl.col("row") // size)
    means = [pl.col(name).mean() for name in frame.columns if name != "step"]
    return numbered.group_by("row", maintain_order=True).agg(pl.col("step").max(), *means).drop("row")
