"""The report's figures: matplotlib, drawn to inline SVG that takes its colours and its font from the page.

Bytes depend on the data alone: ids come from a fixed salt, no date is written, and text stays text.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from mdc.report.tables import Interval

# Stand-ins that `_svg` turns into the page's own colours, so that one drawing serves light and dark.
INK, MUTED, LINE, ACCENT, PAGE = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
PAGE_COLOURS = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    ACCENT: "var(--accent)",
    PAGE: "var(--page)",
}

STYLE: Any = {
    "svg.hashsalt": "mdc",
    "svg.fonttype": "none",
    "text.parse_math": False,  # rule names are the user's: a "$" in one is a dollar
    "font.size": 13,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12.5,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "legend.fontsize": 12,
}

WIDTH = 460  # of every figure, in the page's pixels: readable on a phone, two side by side on a desk
BARS = 60  # at most, of a histogram
POINTS = 72  # matplotlib's units per inch; its SVG counts in the same


@dataclass(frozen=True)
class Dots:
    """One row of a dot-and-interval figure."""

    name: str
    values: tuple[Interval, ...]
    strong: bool = False


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH / POINTS, height / POINTS), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an inline `<svg>`: ids prefixed by `name`, read aloud as `description`."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # it would style the whole page
    # Several drawings share one page: their ids must not meet.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    for stand_in, colour in PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    label = f'<svg role="img" aria-label="{escape(description)}" '
    return Markup(label + svg.removeprefix("<svg ").strip())


def _row_names(axes: Axes, rows: Sequence[Dots]) -> None:
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=13, labelcolor=INK)
    axes.spines["left"].set_visible(False)


def _percent_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def probe_figure(rows: Sequence[Dots], metrics: Sequence[str], description: str) -> Markup:
    """A panel per metric, a row per feature: a dot at the mean, a line over its interval.

    rows: each with one value per metric, as shares.
    """
    with rc_context(STYLE):
        figure = _figure(60 + 46 * len(rows))
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        _row_names(panels[0], rows)
        for column, (axes, metric) in enumerate(zip(panels, metrics, strict=True)):
            values = [row.values[column] for row in rows]
            low, high = min(v.low for v in values), max(v.high for v in values)
            margin = 0.22 * max(high - low, 0.05)  # room for the numbers over the outermost dots
            _percent_axis(axes, max(0.0, low - margin), min(1.0, high + margin))
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.set_title(metric, fontsize=12.5, color=MUTED, loc="center", pad=8)
            for place, (row, value) in enumerate(zip(rows, values, strict=True)):
                colour = ACCENT if row.strong else MUTED
                axes.plot([value.low, value.high], [place, place], color=colour, solid_capstyle="round", linewidth=2.5)
                axes.plot(value.mean, place, "o", color=colour, markersize=8 if row.strong else 7)
                axes.annotate(
                    f"{100 * value.mean:.1f}",
                    (value.mean, place),
                    xytext=(0, 8),
                    textcoords="offset points",
                    ha="center",
                    color=INK if row.strong else MUTED,
                    fontsize=12,
                    fontweight="bold" if row.strong else "normal",
                )
        return _svg(figure, "probe", description)


def compositional_figure(rows: Sequence[Dots], chance: float, description: str) -> Markup:
    """Per rule the shares won with the picture, without it, and by the difference, with a line at chance.

    rows: each with these three values as shares.
    """
    kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("with the picture", "o", {"color": ACCENT}),
        ("without", "o", {"color": MUTED, "markerfacecolor": PAGE}),
        ("difference", "D", {"color": ACCENT, "markerfacecolor": PAGE, "markersize": 5.5}),
    )
    with rc_context(STYLE):
        figure = _figure(84 + 44 * len(rows))
        axes = figure.subplots()
        _row_names(axes, rows)
        low = min(value.low for row in rows for value in row.values)
        _percent_axis(axes, min(low, chance) - 0.05, 1.04)
        axes.axvline(chance, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        for column, (label, marker, look) in enumerate(kinds):
            places = np.arange(len(rows)) + 0.24 * (column - 1)
            values = [row.values[column] for row in rows]
            axes.hlines(places, [v.low for v in values], [v.high for v in values], color=look["color"], linewidth=1.5)
            axes.plot(
                [v.mean for v in values],
                places,
                marker,
                label=label,
                clip_on=False,
                **{"markersize": 7, "markeredgewidth": 1.8, **look},
            )
        figure.legend(loc="outside upper right", ncols=3, handletextpad=0.1, columnspacing=1.2)
        return _svg(figure, "compositional", description)


def loss_figure(losses: pd.DataFrame, unit: str, description: str) -> Markup:
    """Training and validation loss against images seen.

    losses: columns images, train_loss, validation_loss; empty where a step did not measure one of them.
    unit: of the loss.
    """
    with rc_context(STYLE):
        figure = _figure(300)
        axes = figure.subplots()
        validation = losses.dropna(subset="validation_loss")
        train = losses.dropna(subset="train_loss")
        axes.plot(train.images, train.train_loss, color=MUTED, linewidth=1.2, label="train")
        axes.plot(validation.images, validation.validation_loss, "o-", color=ACCENT, markersize=4.5, label="validation")
        axes.set_xlabel("images seen in training")
        axes.set_ylabel(f"loss, {unit}")
        axes.set_xlim(0, None)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="y", color=LINE, linewidth=0.8)
        axes.legend(loc="upper right")
        return _svg(figure, "loss", description)


def length_figure(kept: NDArray[np.int64], dropped: NDArray[np.int64], description: str) -> Markup:
    """Captions per length.

    kept, dropped: the lengths in tokens of the captions that passed the filter and of those that did not.
    """
    with rc_context(STYLE):
        figure = _figure(300)
        axes = figure.subplots()
        centres, step, (kept_counts, dropped_counts) = binned(kept, dropped)
        axes.bar(centres, kept_counts, width=0.8 * step, color=ACCENT, label="kept")
        if len(dropped):
            filled = dropped_counts > 0
            axes.bar(
                centres[filled],
                dropped_counts[filled],
                bottom=kept_counts[filled],
                width=0.8 * step,
                facecolor=PAGE,
                edgecolor=MUTED,
                hatch="////",
                linewidth=1,
                label="dropped",
            )
            figure.legend(loc="outside upper right", ncols=2)
        axes.set_xlabel("tokens in a caption, its end token included")
        axes.set_ylabel("captions")
        axes.set_xlim(-0.5, centres[-1] + step)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="y", color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        return _svg(figure, "lengths", description)


def binned(*samples: NDArray[np.int64]) -> tuple[NDArray[Any], int, list[NDArray[Any]]]:
    """Counts per length of several samples in common bins.

    Returns the bins' centres, how many lengths share a bin (so many that there are at most sixty bins), and the counts.
    """
    longest = int(max(lengths.max(initial=1) for lengths in samples))
    step = -(-longest // BARS)
    edges = np.arange(0, longest + step + 1, step) - 0.5
    centres = edges[:-1] + step / 2
    return centres, step, [np.histogram(lengths, bins=edges)[0] for lengths in samples]


def bar_figure(name: str, rows: Sequence[tuple[str, int]], unit: str, description: str) -> Markup:
    """A bar for each row, the first at the top. name: of the figure, for its ids. unit: of the counts."""
    with rc_context(STYLE):
        figure = _figure(96 + 26 * len(rows))
        axes = figure.subplots()
        _row_names(axes, [Dots(label, ()) for label, _ in rows])
        axes.barh(range(len(rows)), [number for _, number in rows], height=0.62, color=ACCENT)
        for place, (_, number) in enumerate(rows):
            axes.annotate(
                f"{number:,}", (number, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=12
            )
        axes.set_xlim(0, 1.16 * max(number for _, number in rows))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(unit)
        return _svg(figure, name, description)
