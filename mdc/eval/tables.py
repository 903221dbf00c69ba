"""Results in the terminal: a bar while the work runs, and a table at its end."""

from collections.abc import Sequence
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
