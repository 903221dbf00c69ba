"""The tables of results, as text cells: the page and the terminal show the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table as TerminalTable
from rich.text import Text

from mdc.files import read_json, read_whole

ALL = "all fair pairs"
FOIL_TRAINED = "(foil trained on)"  # ends the names of rules whose pairs are not fair
CLASSES_SHOWN = 15
CHANCE = 0.5  # of choosing right between a caption and its foil


class Interval(NamedTuple):
    """A mean and the 95 % interval around it; all three equal where no interval was measured."""

    mean: float
    low: float
    high: float


class Cell(NamedTuple):
    """What one cell says, and what it adds in smaller type."""

    text: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows; all others hold numbers.

    strong: the rows to set apart.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    strong: frozenset[int] = frozenset()


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def count(number: int) -> str:
    return f"{number:,}"


def wilson(share: float, n: int) -> Interval:
    """A share of `n` cases with its 95 % interval (Wilson, 1927), which stays within 0 and 1."""
    z = 1.96
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(share, max(0.0, min(share, centre - reach)), min(1.0, max(share, centre + reach)))


def probe_interval(row: Mapping[str, Any], metric: str) -> Interval:
    """The mean over seeds of `accuracy` or `balanced_accuracy` in a row of probe.json, with its interval."""
    return Interval(row[f"{metric}_mean"], row[f"{metric}_low"], row[f"{metric}_high"])


def _with_interval(value: Interval) -> Cell:
    if value.low == value.high:
        return Cell(percent(value.mean))
    return Cell(percent(value.mean), f"{percent(value.low)}–{percent(value.high)}")


def probe_table(probe: Mapping[str, Any], metrics: Mapping[str, Any]) -> Table:
    """Linear probes and nearest neighbours on frozen features, with every floor."""
    neighbours = metrics.get("knn", {})
    ks = sorted({int(k) for by_k in neighbours.values() for k in by_k})
    rows = []
    for row in probe["rows"]:
        by_k = neighbours.get(row["features"], {})
        rows.append(
            (
                Cell(row["name"]),
                _with_interval(probe_interval(row, "balanced_accuracy")),
                _with_interval(probe_interval(row, "accuracy")),
                *(Cell(percent(by_k[str(k)]["balanced_accuracy"]) if str(k) in by_k else "–") for k in ks),
            )
        )
    block = "" if probe.get("layer") is None else f" of block {probe['layer']} of the encoder"
    return Table(
        caption=f"Test accuracy in %, reading {probe['label']} off frozen features{block}. k-NN: balanced accuracy.",
        columns=("Features", "Probe, balanced", "Probe, plain", *(f"{k}-NN" for k in ks)),
        rows=tuple(rows),
        strong=frozenset(i for i, row in enumerate(probe["rows"]) if row["features"] == "model"),
    )


def compositional_rows(compositional: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rules of compositional.json; all fair pairs together, if there are any, come first."""
    together = metrics["compositional"].get("all")
    return [*([{**together, "rule": ALL}] if together else []), *compositional["rules"]]


def rule_name(rule: str) -> str:
    """A rule as tables and figures name it: a star stands for `FOIL_TRAINED`."""
    return rule.replace(FOIL_TRAINED, "*")


def compositional_table(compositional: Mapping[str, Any], metrics: Mapping[str, Any]) -> Table:
    """How often a caption outscores its foil: with the picture, without it, and by the difference of the two."""
    scorer = compositional["scorer"]
    rows = compositional_rows(compositional, metrics)
    unfair = any(FOIL_TRAINED in row["rule"] for row in rows)
    starred = " * The foil was trained on, the caption was not." if unfair else ""
    cells = tuple(
        (
            Cell(rule_name(row["rule"]), _pairs(row["pairs"], row["ties"])),
            _with_interval(wilson(row[scorer], row["pairs"])),
            _with_interval(wilson(row["blind"], row["pairs"])),
            Cell(percent(row["pmi"])),
        )
        for row in rows
    )
    return Table(
        caption=f"Captions that outscore their foils, in %: by {scorer} with the picture, without it (blind), and by "
        f"the difference of the two (pmi). Chance is {percent(CHANCE)}; a tie counts half.{starred}",
        columns=("Words swapped", "With picture", "Without", "Difference"),
        rows=cells,
        strong=frozenset(i for i, row in enumerate(rows) if row["rule"] == ALL),
    )


def _pairs(pairs: int, ties: int) -> str:
    tied = f", {count(ties)} tied" if ties else ""
    return f"{count(pairs)} {'pair' if pairs == 1 else 'pairs'}{tied}"


def class_table(probe: Mapping[str, Any]) -> Table:
    """Pictures per class, and how many of the test pictures each kind of features recognises; the largest class first.

    Classes beyond the first `CLASSES_SHOWN` are summed up in one row.
    """
    train, test = probe["class_counts"], probe["test_class_counts"]
    sizes = {name: train.get(name, 0) for name in {**train, **test}}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    kinds = [row for row in probe["rows"] if row.get("recall_by_class")]
    rows = [
        (
            Cell(name),
            Cell(count(sizes[name])),
            Cell(count(test.get(name, 0))),
            *(Cell(_percent_or_dash(kind["recall_by_class"].get(name))) for kind in kinds),
        )
        for name in names[:CLASSES_SHOWN]
    ]
    if rest := names[CLASSES_SHOWN:]:
        sums = (Cell(count(sum(counts.get(name, 0) for name in rest))) for counts in (train, test))
        rows.append((Cell(f"{count(len(rest))} others"), *sums, *(Cell("–") for _ in kinds)))
    return Table(
        caption=f"Pictures per {probe['label']}, and the share of its test pictures that the probe recognises, in %.",
        columns=(probe["label"], "Train", "Test", *(kind["name"] for kind in kinds)),
        rows=tuple(rows),
    )


def _percent_or_dash(share: float | None) -> str:
    return "–" if share is None else percent(share)


def caption_table(scores: Mapping[str, Any]) -> Table:
    """How close written captions come to the true ones, by sampler and length, and blind."""
    texts, pictures = scores["references"], scores["pictures"]
    rows = tuple(
        (
            Cell(row["sampler"], f"{row['length']} tokens"),
            *(Cell(percent(row[name])) for name in ("bleu_1", "bleu_2", "bleu_3", "bleu_4")),
            *(Cell(percent(values[name])) for name in ("rouge_l", "cider") for values in (row, row["blind"])),
        )
        for row in scores["rows"]
    )
    return Table(
        caption=f"Captions written for {count(pictures)} test pictures against {count(texts)} true ones, times 100. "
        "Blind: written for the mean picture.",
        columns=("Sampler", "BLEU-1", "2", "3", "4", "ROUGE-L", "blind", "CIDEr", "blind"),
        rows=rows,
    )


def retrieval_table(metrics: Mapping[str, Any]) -> Table:
    """Pictures and captions found among each other, and classes told by their names, beside chance."""
    found = metrics["retrieval"]
    to_texts, to_pictures = found["picture_to_text"], found["text_to_picture"]
    lines: list[tuple[Cell, list[float | None]]] = [
        (Cell(name, detail), [values[f"recall_at_{k}"] for k in (1, 5, 10)])
        for name, detail, values in (
            ("Caption of a picture", "", to_texts["score"]),
            ("Caption of a picture", "difference to blind", to_texts["pmi"]),
            ("Caption of a picture", "chance", to_texts["chance"]),
            ("Picture of a caption", "", to_pictures["score"]),
            ("Picture of a caption", "chance", to_pictures["chance"]),
        )
    ]
    if "zero_shot" in metrics:
        told = metrics["zero_shot"]
        for detail, values in (("", told["score"]), ("difference to blind", told["pmi"]), ("blind", told["blind"])):
            lines.append((Cell("Class by its name", detail), [values["top_1"], values.get("top_5"), None]))
    return Table(
        caption=f"{count(found['pictures'])} test pictures and their {count(found['texts'])} captions found among each "
        "other, %: the right one is the first, or among the first 5 or 10. A tie counts as a fair draw.",
        columns=("Find", "1", "5", "10"),
        rows=tuple((name, *(Cell(_percent_or_dash(value)) for value in values)) for name, values in lines),
    )


def terminal_tables(evaluation: Path) -> list[TerminalTable]:
    """The results as tables for the terminal, every number beside its floor or control.

    evaluation: the folder that the stage of that name wrote. Raises UserError where it has not, or files are damaged.
    """
    read_whole(evaluation, made_by="evaluate")
    metrics = read_json(evaluation / "metrics.json")
    probe, compositional, captions = (
        read_json(evaluation / f"{name}.json") for name in ("probe", "compositional", "captions")
    )
    tables = [probe_table(probe, metrics)] if probe["rows"] else []
    tables += [compositional_table(compositional, metrics)] if compositional["rules"] else []
    tables += [retrieval_table(metrics)] if "retrieval" in metrics else []
    tables += [caption_table(captions["scores"])] if "scores" in captions else []
    return [terminal(table) for table in tables]


def terminal(table: Table) -> TerminalTable:
    """The table for the terminal."""
    shown = TerminalTable(title=Text(table.caption), title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    columns = list(zip(*table.rows, strict=True))
    for number, (title, cells) in enumerate(zip(table.columns, columns, strict=True)):
        plain = number > 0 and not any(cell.detail for cell in cells)
        shown.add_column(Text(title), justify="right" if plain else "left", no_wrap=number > 0)
    widths = [max(len(cell.text) for cell in cells) for cells in columns]
    for number, (name, *values) in enumerate(table.rows):
        texts = [Text.assemble(name.text, (f" ({name.detail})" if name.detail else "", "dim"))]
        for cell, width in zip(values, widths[1:], strict=True):
            texts.append(Text.assemble(cell.text.rjust(width), (f"  {cell.detail}" if cell.detail else "", "dim")))
        shown.add_row(*texts, style="bold" if number in table.strong else "")
    return shown
