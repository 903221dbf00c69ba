"""The `mdc` command. Nothing heavy is imported before a command needs it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdc.errors import Terminated, TrainingFailed, UserError

if TYPE_CHECKING:
    from mdc.api import Captioner

app = typer.Typer(
    help="Visual features from captions: masked diffusion captioning and its rivals.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ParamsFile = Annotated[Path, typer.Option("--params", help="Parameter file.")]
Checkpoint = Annotated[str, typer.Option("--model", help="Checkpoint folder or MLflow model URI.")]
AnyModel = Annotated[
    str, typer.Option("--model", help="Checkpoint, MLflow model URI, timm:NAME@FILE, open_clip:NAME@FILE, or a folder.")
]
Output = Annotated[Path | None, typer.Option("--out", help="Folder for tables and single scores; it is replaced.")]
Scorers = Annotated[str, typer.Option("--scorers", help="Names with commas between; empty = all that fit the model.")]
MODEL = "outputs/model"


def _captioner(model: str) -> "Captioner":
    """A model of ours; UserError for those of other libraries, which write no captions."""
    import mdc
    from mdc.api import Captioner

    loaded = mdc.load(model)
    if not isinstance(loaded, Captioner):
        raise UserError(f"{model} is an encoder of another library: it writes no captions; give a checkpoint of mdc")
    return loaded


def _comparer(model: str, scorers: str) -> tuple[Any, list[str]]:
    """A model that compares captions, and those of its scorers that are asked for."""
    import mdc

    loaded = mdc.load(model)
    if not loaded.scorers:
        raise UserError(f"{model} is an encoder alone: it cannot score captions; give a model that reads text as well")
    wanted = [name.strip() for name in scorers.split(",") if name.strip()] or list(loaded.scorers)
    if unfit := [name for name in wanted if name not in loaded.scorers]:
        raise UserError(f"scorer {unfit[0]!r} does not fit {model}; those that do: {', '.join(loaded.scorers)}")
    return loaded, wanted


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="download, caption, shard, pretrain, extract, evaluate or report.")],
    params: ParamsFile = Path("params.yaml"),
) -> None:
    """Run one stage of the pipeline, without DVC or Prefect."""
    from mdc.config import load_params
    from mdc.processes import end_with_parent
    from mdc.stages import run_stage

    if "DVC_ROOT" in os.environ:  # `dvc repro` runs this: a killed one must not leave a writer behind
        end_with_parent()
    try:
        typer.echo(f"{name}: wrote {run_stage(name, load_params(params))}")
    except (KeyboardInterrupt, Terminated) as stop:
        typer.echo(f"error: stage {name} was told to end; run the same command to continue", err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None


@app.command()
def worker(
    params: ParamsFile = Path("params.yaml"),
    endpoint: Annotated[str, typer.Option(help="HOST:PORT where the hosts meet; else compute.endpoint.")] = "",
    output: Annotated[Path | None, typer.Option(help="Checkpoint folder to make; else the stage's own.")] = None,
) -> None:
    """Take part in a training on this host, beside `mdc stage pretrain` on another one or in a job of a cluster."""
    from mdc.config import load_params
    from mdc.stages import join_training

    try:
        typer.echo(f"pretrain: wrote {join_training(load_params(params), endpoint, output)}")
    except (KeyboardInterrupt, Terminated) as stop:
        typer.echo("error: this host's part in the training was told to end; the same command takes it up", err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None


@app.command()
def sample(folder: Annotated[Path, typer.Argument(help="Where to put it.")] = Path("data/sample")) -> None:
    """Build the sample: OpenMoji drawings as PNG files and a list of their URLs and names."""
    from mdc.data.sample import build_sample

    typer.echo(f"{folder}: {build_sample(folder)} pictures with captions")


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="Cells, grid and seeds, as in infra/sweeps/.")],
    params: ParamsFile = Path("params.yaml"),
    variant: Annotated[str, typer.Option(help="One of the file's variants.")] = "",
) -> None:
    """Train and evaluate every cell of a sweep on the shards that exist, and show them side by side.

    What is finished is not done again: run the same command after an interruption.
    """
    from mdc.config import load_sweep

    plan = load_sweep(file, params, variant)  # mistakes are told before anything heavy is imported
    from rich.console import Console

    from mdc.sweep.run import run_sweep
    from mdc.sweep.table import terminal_tables

    try:
        table, failures = run_sweep(plan, file, lambda text: typer.echo(text, err=True))
    except (KeyboardInterrupt, Terminated) as stop:
        typer.echo(f"error: sweep {plan.name} was told to end; run the same command to continue", err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None
    console = Console()
    for shown in terminal_tables(table):
        console.print(shown)
    console.print(f"Tables: {plan.outputs / 'table.md'}, .csv and .json", soft_wrap=True)
    if failures:
        raise TrainingFailed("; ".join(failures))


@app.command()
def results(params: ParamsFile = Path("params.yaml")) -> None:
    """Show the scores as a table, and where the report is."""
    from rich.console import Console

    from mdc.config import load_params
    from mdc.report.tables import terminal_tables
    from mdc.stages import Folders

    at = Folders.of(load_params(params).paths)
    console = Console()
    for table in terminal_tables(at.evaluation):
        console.print(table)
    console.print(f"Report: {at.report / 'report.html'}", soft_wrap=True)


@app.command()
def doctor(params: ParamsFile = Path("params.yaml")) -> None:
    """Check the installation, and that every file that a manifest names is there and whole."""
    from mdc.config import load_params
    from mdc.doctor import examine

    findings = examine(load_params(params))
    for finding in findings:
        typer.echo(str(finding))
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


@app.command()
def caption(
    images: list[Path],
    model: Checkpoint = MODEL,
    length: Annotated[int, typer.Option(help="Tokens, the end token included.")] = 8,
    seed: int = 0,
) -> None:
    """Write a caption for each picture."""
    for image, text in zip(images, _captioner(model).caption(images, length=length, seed=seed), strict=True):
        typer.echo(f"{image}\t{text}")


@app.command()
def fill(image: Path, template: str, model: Checkpoint = MODEL) -> None:
    """Fill the [MASK] words of a template, such as "a [MASK] dog"."""
    typer.echo(_captioner(model).fill(image, template))


@app.command()
def score(
    image: Path,
    captions: list[str],
    model: Checkpoint = MODEL,
    scorer: Annotated[str, typer.Option(help="mc, heuristic, unmask, autoregressive or cosine.")] = "mc",
) -> None:
    """Say how well each caption fits a picture; higher is better."""
    scores = _captioner(model).score([image] * len(captions), captions, scorer=scorer)
    for text, value in zip(captions, scores.tolist(), strict=True):
        typer.echo(f"{value:.4f}\t{text}")


@app.command()
def compositional(
    benchmark: Annotated[str, typer.Argument(help="aro, sugar_crepe, or one of their sets, such as swap_obj.")],
    data: Annotated[Path, typer.Option(help="Folder with the published files.")],
    images: Annotated[Path, typer.Option(help="Folder with the pictures.")],
    model: AnyModel = MODEL,
    scorers: Scorers = "",
    draws: Annotated[int, typer.Option(min=2, help="Of the scorer mc: masks per caption.")] = 32,
    seed: Annotated[int, typer.Option(help="Of draws and shuffled words.")] = 0,
    out: Output = None,
    partial: Annotated[bool, typer.Option(help="Take files with fewer questions than were published.")] = False,
    skip_long: Annotated[bool, typer.Option(help="Leave out captions longer than the model takes.")] = False,
) -> None:
    """Does the model prefer a caption to its foils? ARO and SugarCrepe, with blind and PMI beside every score."""
    from mdc.eval.answers import write_answers
    from mdc.eval.benchmarks import read_benchmark, sets_of
    from mdc.eval.tables import answer_table, asked, show

    loaded, wanted = _comparer(model, scorers)
    benchmarks = [
        read_benchmark(name, data, images, seed, partial).shorter(loaded.too_long, skip_long)
        for name in sets_of(benchmark)
    ]
    answers = [asked(loaded, each, wanted, draws, seed) for each in benchmarks]
    facts = {"model": model, "fingerprint": loaded.fingerprint, "draws": draws, "seed": seed}
    show(answer_table(answers))
    if out is not None:
        write_answers(out, answers, facts)
        typer.echo(f"Tables and single scores: {out}")


Index = Annotated[Path, typer.Option("--index", help="Folder of the index.")]
INDEX = Path("outputs/features/index")
index_app = typer.Typer(help="Keep an index of pictures: add and remove.", no_args_is_help=True)
app.add_typer(index_app, name="index")


@app.command()
def search(
    pictures: Annotated[list[Path], typer.Argument(help="Pictures to look for.")],
    index: Index = INDEX,
    model: AnyModel = MODEL,
    neighbours: Annotated[int, typer.Option("-k", min=1, help="Of each picture.")] = 10,
) -> None:
    """Find the pictures whose features are nearest, by cosine."""
    import mdc
    from mdc.eval.index import CosineIndex

    found, loaded = CosineIndex.load(index), mdc.load(model)
    similarities, uids = found.search(loaded.encode(pictures).numpy(), neighbours, loaded.fingerprint)
    for picture, row, names in zip(pictures, similarities.tolist(), uids.tolist(), strict=True):
        for similarity, uid in zip(row, names, strict=True):
            typer.echo(f"{picture}\t{similarity:.4f}\t{uid}")


@index_app.command()
def add(
    pictures: Annotated[list[Path], typer.Argument(help="Pictures; their path as given is their uid.")],
    index: Index,
    model: AnyModel = MODEL,
) -> None:
    """Add pictures to an index, which is made if there is none."""
    import mdc
    from mdc.eval.index import CURRENT, CosineIndex

    loaded, uids = mdc.load(model), list(map(str, pictures))
    vectors = loaded.encode(pictures).numpy()
    if (index / CURRENT).is_file():
        grown = CosineIndex.load(index).add(uids, vectors, loaded.fingerprint)
    else:
        grown = CosineIndex.build(uids, vectors, loaded.fingerprint)
    grown.save(index)
    typer.echo(f"{index}: {len(grown)} pictures, recall@10 {grown.facts.recall_at_10:.3f}")


@index_app.command()
def remove(uids: list[str], index: Index) -> None:
    """Remove pictures from an index by uid."""
    from mdc.eval.index import CosineIndex

    rest = CosineIndex.load(index).remove(uids)
    rest.save(index)
    typer.echo(f"{index}: {len(rest)} pictures, recall@10 {rest.facts.recall_at_10:.3f}")


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="Folder to write; it is replaced.")],
    model: Checkpoint = MODEL,
    onnx: Annotated[bool, typer.Option(help="Also as ONNX; takes the extra `export`.")] = True,
) -> None:
    """Write the encoder for timm, transformers and ONNX, and check that each gives equal features."""
    from mdc.api import loaded_model
    from mdc.export import export_encoder

    export_encoder(loaded_model(model), out, onnx)
    typer.echo(f"{out}: see README.md there for how to open it")


def main() -> None:
    """Entry point: a user's mistake is one clear message and exit code 2, a failed training one and 1: no traceback."""
    try:
        app()
    except (UserError, TrainingFailed) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
