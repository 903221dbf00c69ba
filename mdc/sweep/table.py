"""The table of a sweep: for every cell the mean over seeds with its 95 % interval, floors and controls beside it."""

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from mdc.config import SweepPlan, SweepRun
from mdc.eval.measures import summarise
from mdc.files import read_json, whole_file, write_json
from mdc.stages import Folders
from mdc.sweep.finished import stages_left
from mdc.train.work import COST

FILES = ("table.csv", "table.md", "table.json")


class Measure(NamedTuple):
    """A column. share: of 1, shown in %, with an interval; else a plain number."""

    name: str
    title: str
    share: bool = True


MEASURES = (
    Measure("probe_balanced", "Probe, balanced"),
    Measure("untrained_balanced", "untrained"),
    Measure("pixels_balanced", "pixels"),
    Measure("probe", "Probe, plain"),
    Measure("untrained", "untrained"),
    Measure("pixels", "pixels"),
    Measure("knn", "k-NN, balanced"),
    Measure("compositional", "With picture"),
    Measure("blind", "blind"),
    Measure("pmi", "pmi"),
    Measure("seconds", "Seconds", share=False),
    Measure("images_per_s", "Images/s", share=False),
)
GROUPS = {  # as the terminal shows them, whose width they must fit
    "balanced accuracy on frozen features": ("probe_balanced", "untrained_balanced", "pixels_balanced", "knn"),
    "plain accuracy on frozen features, and cost": ("probe", "untrained", "pixels", "seconds", "images_per_s"),
    "captions that outscore their foils": ("compositional", "blind", "pmi"),
}
NOTE = (
    "Means over seeds of pretraining, in %, with 95 % intervals by Student's t. Probe and k-NN read the class off "
    "frozen test features; beside the probe stand its floors, the untrained encoder and raw pixels. With picture: "
    "captions that outscore their foils, by the scorer of the objective; blind: the same without the picture; pmi: by "
    "the difference of the two; chance is 50. Seconds: of training, without validation, on the machine at hand."
)


@dataclass(frozen=True)
class Row:
    """A cell of the sweep. values: by measure, one for each finished seed. wanted: number of seeds."""

    cell: str
    wanted: int
    seeds: list[int]
    values: Mapping[str, list[float]]


@dataclass(frozen=True)
class SweepTable:
    name: str
    rows: list[Row]


def collect(plan: SweepPlan) -> SweepTable:
    """Read the scores of all runs that are finished."""
    by_cell: dict[str, list[SweepRun]] = {}
    for run in plan.runs:
        by_cell.setdefault(run.cell, []).append(run)
    return SweepTable(plan.name, [_row(cell, runs) for cell, runs in by_cell.items()])


def _row(cell: str, runs: list[SweepRun]) -> Row:
    finished = [run for run in runs if not stages_left(run.params)]
    found = [_scores(run) for run in finished]
    names = [measure.name for measure in MEASURES if all(measure.name in scores for scores in found)]
    values = {name: [scores[name] for scores in found] for name in names} if found else {}
    return Row(cell, len(runs), [run.seed for run in finished], values)


def _scores(run: SweepRun) -> dict[str, float]:
    """What a run reached, by measure; without those that its data did not allow."""
    at = Folders.of(run.params.paths)
    metrics = read_json(at.evaluation / "metrics.json")
    scores: dict[str, float] = {}
    for features, reached in metrics.get("probe", {}).items():
        name = "probe" if features == "model" else features
        scores |= {name: reached["accuracy"], f"{name}_balanced": reached["balanced_accuracy"]}
    if "knn" in metrics:
        nearest = metrics["knn"]["model"][str(run.params.evaluate.knn_k[0])]
        scores["knn"] = nearest["balanced_accuracy"]
    if pairs := metrics["compositional"].get("all"):
        scorer = read_json(at.evaluation / "compositional.json")["scorer"]
        scores |= {"compositional": pairs[scorer], "blind": pairs["blind"], "pmi": pairs["pmi"]}
    if (at.runs / COST).is_file():
        cost = read_json(at.runs / COST)
        scores |= {"seconds": cost["seconds"], "images_per_s": cost["images"] / max(cost["seconds"], 1e-9)}
    return scores


# Ways to show it


def write_tables(table: SweepTable, folder: Path) -> None:
    """Write `FILES`: numbers for programs as csv and json, and a table to read."""
    write_json(folder / "table.json", _as_json(table))
    for name, text in (("table.csv", _as_csv(table)), ("table.md", _as_markdown(table))):
        with whole_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _as_json(table: SweepTable) -> dict[str, Any]:
    return {
        "sweep": table.name,
        "cells": [
            {
                "cell": row.cell,
                "seeds": row.seeds,
                "seeds_wanted": row.wanted,
                "measures": {
                    measure.name: {"values": row.values[measure.name], **_summary(measure, row)}
                    for measure in MEASURES
                    if measure.name in row.values
                },
            }
            for row in table.rows
        ],
    }


def _summary(measure: Measure, row: Row) -> dict[str, float]:
    values = row.values[measure.name]
    return summarise(values)._asdict() if measure.share else {"mean": sum(values) / len(values)}


def _as_csv(table: SweepTable) -> str:
    parts = [(m, part) for m in MEASURES for part in (("mean", "low", "high") if m.share else ("mean",))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cell", "seeds", *(f"{measure.name}_{part}" for measure, part in parts)])
    for row in table.rows:
        summaries = {m.name: _summary(m, row) for m in MEASURES if m.name in row.values}
        cells = [summaries.get(measure.name, {}).get(part) for measure, part in parts]
        writer.writerow([row.cell, len(row.seeds), *("" if value is None else f"{value:.6g}" for value in cells)])
    return text.getvalue()


def _cell(measure: Measure, row: Row, join: Callable[[str, str], str]) -> str:
    if measure.name not in row.values:
        return "–"
    summary = _summary(measure, row)
    if not measure.share:
        return f"{summary['mean']:,.0f}"
    mean, low, high = (f"{100 * summary[part]:.1f}" for part in ("mean", "low", "high"))
    return mean if low == high else join(mean, f"{low}–{high}")


def _seeds(row: Row) -> str:
    return str(len(row.seeds)) if len(row.seeds) == row.wanted else f"{len(row.seeds)} of {row.wanted}"


def _as_markdown(table: SweepTable) -> str:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"

    lines = [line(["Cell", "Seeds", *(m.title for m in MEASURES)]), line(["---", *(["---:"] * (len(MEASURES) + 1))])]
    for row in table.rows:
        shown = [_cell(m, row, lambda mean, interval: f"{mean} ({interval})") for m in MEASURES]
        lines.append(line([row.cell, _seeds(row), *shown]))
    return f"# Sweep {table.name}\n\n{''.join(lines)}\n{NOTE}\n"


def terminal_tables(table: SweepTable) -> list[Table]:
    """Features with their floors; captions against foils with their control, and cost. Intervals below their means."""
    shown = []
    for title, names in GROUPS.items():
        grid = Table(title=Text(f"{table.name}: {title}"), title_justify="left", title_style="", box=box.SIMPLE_HEAD)
        grid.add_column("Cell", overflow="fold")
        grid.add_column("Seeds", justify="right", no_wrap=True)
        measures = [measure for measure in MEASURES if measure.name in names]
        for measure in measures:
            grid.add_column(Text(measure.title.removesuffix(", balanced").removesuffix(", plain")), justify="right")
            grid.columns[-1].no_wrap = True
        for row in table.rows:
            cells = [_cell(m, row, lambda mean, interval: f"{mean}\n{interval}") for m in measures]
            grid.add_row(Text(row.cell), _seeds(row), *cells)
        shown.append(grid)
    shown[-1].caption = NOTE
    shown[-1].caption_justify = "left"
    return shown
