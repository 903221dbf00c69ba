"""What every row of the benchmark shares: two sides timed in turn, their figures, and the page that shows them.

A row is a module of this folder with a function `measure() -> list[Result | Growth]`; `bench.__main__.ROWS` names it.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FIGURES, PAGE = FOLDER / "results.json", FOLDER / "RESULTS.md"


@dataclass(frozen=True)
class Result:
    """Two sides of one piece of work, one figure per round and side, in the order in which they were taken."""

    row: str  # the name for `make bench ROW=...`
    work: str  # what is done
    against: str  # what `theirs` is
    unit: str
    ours: list[float]
    theirs: list[float]
    aim: float | None = None  # for the ratio ours / theirs; None = shown for comparison
    smaller_is_better: bool = False
    compared: str = ""  # one line on what each side does

    def ratios(self) -> list[float]:
        """Of each round."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)

    def is_met(self) -> bool | None:
        if self.aim is None:
            return None
        return self.ratio() <= self.aim if self.smaller_is_better else self.ratio() >= self.aim


@dataclass(frozen=True)
class Growth:
    """How one figure grows with a size: `points` holds its rounds by size."""

    row: str
    work: str
    unit: str
    points: dict[str, list[float]] = field(default_factory=dict)
    compared: str = ""


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each side by round, taken A B A B ... so that a machine that drifts drifts under all of them.

    warmup: rounds before the first that counts.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warmup, rounds):
        for name, work in sides.items():
            spent = seconds(work)
            if number >= 0:
                taken[name].append(spent)
    return taken


def rates(amount: float, taken: Sequence[float]) -> list[float]:
    """`amount` per second, by round."""
    return [amount / spent for spent in taken]


def machine(threads: int) -> str:
    """One line on what the figures were taken with. threads: of torch."""
    import torch

    processor = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{processor}, {len(os.sched_getaffinity(0))} cores, {threads} threads, float32, torch {torch.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )


# -- the page ---------------------------------------------------------------------------------------------------------


def record(row: str, figures: Sequence[Result | Growth], where: str, order: Sequence[str]) -> None:
    """Keep a row's figures in place of its former ones, and write the page anew. order: names of all rows."""
    kept: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.is_file() else {}
    kept[row] = {
        "machine": where,
        "results": [asdict(figure) for figure in figures if isinstance(figure, Result)],
        "growth": [asdict(figure) for figure in figures if isinstance(figure, Growth)],
    }
    kept = {name: kept[name] for name in order if name in kept}
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))


def _spread(values: Sequence[float]) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    digits = 2 if middle < 10 else 1 if middle < 100 else 0
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _result_line(result: Result) -> str:
    ratios = result.ratios()
    ratio = f"**{result.ratio():.2f}** ({min(ratios):.2f}–{max(ratios):.2f})"
    sign = "≤" if result.smaller_is_better else "≥"
    met = result.is_met()
    aim = "–" if met is None else f"{sign} {result.aim} {'met' if met else '**missed**'}"
    cells = (
        result.row,
        result.work,
        result.against,
        f"{_spread(result.ours)} {result.unit}",
        f"{_spread(result.theirs)} {result.unit}",
        ratio,
        aim,
    )
    return f"| {' | '.join(cells)} |"


HEAD = """# Benchmarks

`make bench` runs all rows, `make bench ROW=step` one of them. It writes this page from `results.json` beside it, which
holds every round. Both sides of a row run in turn in one run (ours, theirs, ours, theirs ...). A figure is the median
over its rounds, with the smallest and the largest; a ratio is ours / theirs of the medians, with the smallest and the
largest ratio of a round.
"""


def page(kept: dict[str, Any]) -> str:
    results = [Result(**entry) for row in kept.values() for entry in row["results"]]
    growths = [Growth(**entry) for row in kept.values() for entry in row["growth"]]
    lines = [HEAD, "| row | work | against | ours | theirs | ours / theirs | aim |", "|---|---|---|---|---|---|---|"]
    lines += [_result_line(result) for result in results]
    lines += ["", "What is compared:", ""]
    lines += [f"- **{result.row}**, {result.work}: {result.compared}" for result in results if result.compared]
    if growths:
        lines += ["", "## How cost grows", "", "| row | work | size: figure |", "|---|---|---|"]
        for growth in growths:
            points = "; ".join(f"{size}: {_spread(values)}" for size, values in growth.points.items())
            lines.append(f"| {growth.row} | {growth.work}, {growth.unit} | {points} |")
        lines += [
            "",
            *(f"- **{growth.row}**, {growth.work}: {growth.compared}" for growth in growths if growth.compared),
        ]
    places: dict[str, list[str]] = {}
    for name, row in kept.items():
        places.setdefault(row["machine"], []).append(name)
    lines += ["", "## Machine", ""]
    lines += [f"- {', '.join(names)}: {where}" for where, names in places.items()]
    notes = (FOLDER / "NOTES.md").read_text().strip()
    return "\n".join([*lines, "", notes, ""])
