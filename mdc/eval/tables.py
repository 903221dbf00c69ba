"""Results in the terminal: a bar while the work runs, and a table at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from mdc.eval.answers import Answers, answer, averages, captions_of
from mdc.eval.benchmarks import Benchmark, Picture


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def asked(model: Any, benchmark: Benchmark, scorers: Sequence[str], draws: int, seed: int) -> Answers:
    """The answers of a model as `mdc.load` opens it."""

    def see(pictures: Sequence[Picture]) -> Tensor:
        return model.see([picture.open() for picture in pictures])

    captions = captions_of(benchmark.questions)
    wanted = sum(map(len, captions.values())) + len({text for row in captions.values() for text in row})
    with tqdm(total=wanted, desc=benchmark.name, unit="caption") as progress:
        return answer(model, benchmark, see, scorers, draws, seed, progress.update)


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """names: columns of text, which fold where there is little room. numbers: columns that never do."""
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def answer_table(answers: Sequence[Answers]) -> Table:
    """A line per set and scorer; the averages of several sets at the end."""
    table = _table(
        "The caption above its foils, % (a tie counts as a fair coin; ± one standard error)",
        ("set", "scorer"),
        ("score", "macro", "blind", "pmi", "chance", "ties", "asked"),
    )
    records = [record for each in answers for record in each.records]
    for r in records:
        table.add_row(
            r["set"],
            r["scorer"],
            f"{percent(r['score'])} ±{percent(r['score_stderr'])}",
            percent(r.get("score_macro")),
            percent(r["blind"]),
            percent(r["pmi"]),
            percent(r["chance"]),
            str(r["score_ties"]),
            str(r["questions"]),
        )
    for mean in averages(records) if len(answers) > 1 else []:
        for kind in ("micro", "macro"):
            values = [percent(mean[f"{name}_{kind}"]) for name in ("score", "blind", "pmi")]
            table.add_row(f"{kind} average", mean["scorer"], values[0], "", *values[1:], "", "", str(mean["questions"]))
    return table


def probe_table(results: Mapping[str, Any]) -> Table:
    """A line per features and method, with intervals where there are several seeds."""
    table = _table(
        f"{results['data']}: {results['train']} pictures to train on, {results['test']} to test with; the most "
        f"frequent class {percent(results['most_frequent_class'])} %; ± half of a 95 % interval over seeds",
        ("encoder", "method"),
        ("top-1 %", "top-5 %", "mean of\nclasses %", "trained\non"),
    )
    for row in results["rows"]:
        values = [_with_interval(row, name) for name in ("top_1", "top_5", "mean_per_class")]
        table.add_row(row["features"], row["method"], *values, str(row["train"]))
    return table


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return "–"
    mean, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return percent(mean) + ("" if low == high else f" ±{percent(max(mean - low, high - mean))}")


def retrieval_table(results: Mapping[str, Any]) -> Table:
    recalls = list(results["picture_to_text"]["score"])
    table = _table(
        f"{results['pictures']} pictures and {results['texts']} texts found among each other by {results['scorer']}: "
        "recall, %",
        ("find", "by"),
        [name.removeprefix("recall_").replace("_", " ") for name in recalls],
    )
    for way, name in (("picture_to_text", "texts"), ("text_to_picture", "pictures")):
        for by, values in results[way].items():
            table.add_row(name, by, *(percent(values[recall]) for recall in recalls))
    return table


def zero_shot_table(results: Mapping[str, Any]) -> Table:
    table = _table(
        f"{results['data']}: {results['pictures']} pictures, {results['classes']} classes, {results['scorer']}; chance "
        f"{percent(results['chance'])} %",
        ("by",),
        [f"{name.replace('_', '-')} %" for name in results["score"]],
    )
    for by in ("score", "pmi", "blind"):
        table.add_row(by, *map(percent, results[by].values()))
    return table


def caption_table(results: Mapping[str, Any]) -> Table:
    measures = ("cider", "bleu_1", "bleu_4", "rouge_l")
    table = _table(
        f"Captions of {results['pictures']} pictures with {results['references']} references",
        ("sampler",),
        ("length", *measures, "cider\nblind"),
    )
    for row in results["rows"]:
        values = [f"{row[name]:.3f}" for name in measures]
        table.add_row(row["sampler"], str(row["length"]), *values, f"{row['blind']['cider']:.3f}")
    return table
