"""Results in the terminal: a bar while the work runs, and a table at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from mdc.eval.answers import Answers, answer, averages, captions_of
from mdc.eval.benchmarks import Benchmark, Picture


def show(*tables: Table) -> None:
    console = Console()
    for table in tables:
        console.print(table)


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


def answer_table(answers: Sequence[Answers]) -> Table:
    """A line per set and scorer; the averages of several sets at the end."""
    table = Table(title="The caption above its foils, % (a tie counts as a fair coin)")
    for name in ("set", "scorer"):
        table.add_column(name)
    for name in ("score", "macro", "blind", "pmi", "chance", "ties", "questions"):
        table.add_column(name, justify="right")
    records = [record for each in answers for record in each.records]
    for r in records:
        table.add_row(
            r["set"],
            r["scorer"],
            f"{percent(r['score'])} ± {percent(r['score_stderr'])}",
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
    title = f"{results['data']}: {results['train']} pictures to train on, {results['test']} to test with"
    table = Table(title=f"{title}; the most frequent class {percent(results['most_frequent_class'])} %")
    table.add_column("features")
    table.add_column("method")
    for name in ("top-1 %", "top-5 %", "mean per class %", "trained on"):
        table.add_column(name, justify="right")
    for row in results["rows"]:
        values = [_with_interval(row, name) for name in ("top_1", "top_5", "mean_per_class")]
        table.add_row(row["features"], row["method"], *values, str(row["train"]))
    return table


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return "–"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return percent(row[name]) + ("" if low == high else f" ({percent(low)}–{percent(high)})")


def retrieval_table(results: Mapping[str, Any]) -> Table:
    table = Table(title=f"{results['pictures']} pictures and {results['texts']} texts, {results['scorer']}")
    table.add_column("find")
    table.add_column("by")
    recalls = list(results["picture_to_text"]["score"])
    for name in recalls:
        table.add_column(f"{name.replace('_', ' ')} %", justify="right")
    for way, name in (("picture_to_text", "texts"), ("text_to_picture", "pictures")):
        for by, values in results[way].items():
            table.add_row(name, by, *(percent(values[recall]) for recall in recalls))
    return table


def zero_shot_table(results: Mapping[str, Any]) -> Table:
    title = f"{results['data']}: {results['pictures']} pictures, {results['classes']} classes, {results['scorer']}"
    table = Table(title=f"{title}; chance {percent(results['chance'])} %")
    table.add_column("by")
    for name in results["score"]:
        table.add_column(f"{name.replace('_', '-')} %", justify="right")
    for by in ("score", "pmi", "blind"):
        table.add_row(by, *map(percent, results[by].values()))
    return table


def caption_table(results: Mapping[str, Any]) -> Table:
    table = Table(title=f"Captions of {results['pictures']} pictures with {results['references']} references")
    for name in ("sampler", "length"):
        table.add_column(name)
    measures = ("cider", "bleu_1", "bleu_4", "rouge_l")
    for name in (*measures, "CIDEr blind"):
        table.add_column(name, justify="right")
    for row in results["rows"]:
        values = [f"{row[name]:.3f}" for name in measures]
        table.add_row(row["sampler"], str(row["length"]), *values, f"{row['blind']['cider']:.3f}")
    return table
