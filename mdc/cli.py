"""The `mdc` command. Nothing heavy is imported before a command needs it."""

import errno
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from mdc.config import ComputeParams, EvaluateParams, checked, choose
from mdc.errors import Terminated, TrainingFailed, UserError
from mdc.processes import on_ctrl_c

if TYPE_CHECKING:
    from mdc.api import Captioner


class _Commands(typer.core.TyperGroup):
    """Ctrl-C ends a command with exit code 130 and no traceback; Typer's own is 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None


app = typer.Typer(
    cls=_Commands,
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
Layer = Annotated[int | None, typer.Option(help="Block of the encoder, from 0, or -1 the last; for our models.")]
MODEL = "outputs/model"
CAPTION_LENGTHS = (10, 15, 20)  # tokens, of captions that are scored
PLACES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)  # errors of a place, not of the work
EVALUATE = EvaluateParams()  # the protocol of the stage is that of the commands


def _listed(numbers: list[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


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
    from mdc.processes import end_with_parent, is_first_rank
    from mdc.stages import run_stage

    if "DVC_ROOT" in os.environ:  # `dvc repro` runs this: a killed one must not leave a writer behind
        end_with_parent()
    try:
        made = run_stage(name, load_params(params))
        if is_first_rank():
            typer.echo(f"{name}: wrote {made}")
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

    _check_output(folder, name="FOLDER")
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
    from mdc.sweep.run import run_sweep
    from mdc.sweep.table import terminal_tables
    from mdc.terminal import show

    try:
        table, failures = run_sweep(plan, file, lambda text: typer.echo(text, err=True))
    except (KeyboardInterrupt, Terminated) as stop:
        typer.echo(f"error: sweep {plan.name} was told to end; run the same command to continue", err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None
    show(*terminal_tables(table))
    typer.echo(f"Tables: {plan.outputs / 'table.md'}, .csv and .json")
    if failures:
        raise TrainingFailed("; ".join(failures))


@app.command()
def results(params: ParamsFile = Path("params.yaml")) -> None:
    """Show the scores as a table, and where the report is."""
    from mdc.config import load_params
    from mdc.report.tables import terminal_tables
    from mdc.stages import Folders
    from mdc.terminal import show

    at = Folders.of(load_params(params).paths)
    show(*terminal_tables(at.evaluation))
    typer.echo(f"Report: {at.report / 'report.html'}")


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
    images: Annotated[
        list[Path] | None, typer.Argument(help="Pictures; with --references, the folder of them.")
    ] = None,
    model: Checkpoint = MODEL,
    length: Annotated[int, typer.Option(help="Tokens, the end token included.")] = 8,
    seed: int = 0,
    references: Annotated[Path | None, typer.Option(help="True captions, in a file of COCO's kinds.")] = None,
    lengths: Annotated[
        str,
        typer.Option(help="With --references: lengths to score, with commas between; empty = 10, 15, 20 if it fits."),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="With --references: the first so many pictures.")] = 1000,
    out: Output = None,
) -> None:
    """Write a caption for each picture; with --references, score such captions by CIDEr, BLEU and ROUGE-L."""
    _check_output(out)
    loaded = _captioner(model)
    if references is None:
        if not images:
            raise UserError("name pictures, or a file of true captions by --references and the folder of its pictures")
        for image, text in zip(images, loaded.caption(images, length=length, seed=seed), strict=True):
            typer.echo(f"{image}\t{text}")
        return
    from mdc.eval.commands import SHOWN, caption_all, captions_page, write_results
    from mdc.eval.references import read_references
    from mdc.eval.tables import caption_table
    from mdc.terminal import show

    if not images or len(images) != 1:
        raise UserError("with --references give one folder, which holds the pictures")
    found = read_references(references, images[0], limit=limit)
    longest = loaded.loaded.config.max_tokens
    wanted = _counts(lengths, "--lengths") or [n for n in CAPTION_LENGTHS if n <= longest] or [longest]
    if max(wanted) > longest:
        raise UserError(f"--lengths {max(wanted)}: {model} writes at most {longest} tokens, the end token included")
    results = caption_all(loaded.loaded, loaded.see, found, wanted, seed)
    show(caption_table(results))
    if out is not None:
        shown = found[:SHOWN]
        written = loaded.caption([each.picture.open() for each in shown], length=wanted[-1], seed=seed)
        facts = {"model": model, "fingerprint": loaded.fingerprint, "file": references.name, "seed": seed}
        write_results(out, results, facts, captions_page(shown, written, f"Captions by {model}"))
        typer.echo(f"Tables and pictures: {out}")


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
    from mdc.eval.tables import answer_table, asked
    from mdc.terminal import show

    _check_output(out)
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


Labelled = Annotated[
    str, typer.Argument(help="imagefolder:PATH, torchvision:NAME@ROOT, webdataset:PATH or shards:PATH, with labels.")
]


@app.command()
def probe(
    data: Annotated[list[str], typer.Argument(help="Labelled sets: KIND:PATH, see `mdc zeroshot --help`.")],
    model: Annotated[list[str] | None, typer.Option("--model", help="One as elsewhere, or several to compare.")] = None,
    shots: Annotated[str, typer.Option(help="Few-shot probes: pictures per class in all, with commas between.")] = "",
    seeds: Annotated[int, typer.Option(help="Repetitions behind the intervals.")] = EVALUATE.probe_seeds,
    epochs: Annotated[
        int, typer.Option(help="Passes over the training features; 0 = by their number.")
    ] = EVALUATE.probe_epochs,
    learning_rates: Annotated[str, typer.Option(help="Of Adam, with commas between.")] = _listed(
        EVALUATE.probe_learning_rates
    ),
    weight_decays: Annotated[str, typer.Option(help="L2 penalties, with commas between.")] = _listed(
        EVALUATE.probe_weight_decays
    ),
    poolings: Annotated[str, typer.Option(help="Of patches, with commas between: mean, max; for our models.")] = "mean",
    layer: Layer = None,
    attentive: Annotated[bool, typer.Option(help="Also a probe that attends to the patches; for our models.")] = False,
    floors: Annotated[bool, typer.Option(help="Also raw pixels and the untrained encoder.")] = True,
    cache: Annotated[Path, typer.Option(help="Where features are kept.")] = Path("runs/features"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: int = 0,
    out: Output = None,
) -> None:
    """How well a linear classifier reads classes off frozen features; also few-shot and nearest neighbours."""
    from mdc import dist
    from mdc.compared import encoders_of
    from mdc.eval.commands import check_encoders, probe_all, write_results
    from mdc.eval.labelled import open_labelled
    from mdc.eval.tables import probe_table
    from mdc.terminal import show

    p = checked(
        EvaluateParams,
        "mdc probe",
        probe_learning_rates=_numbers(learning_rates),
        probe_weight_decays=_numbers(weight_decays),
        probe_epochs=epochs,
        probe_seeds=seeds,
        seed=seed,
    )
    counts, models = _counts(shots, "--shots"), list(dict.fromkeys(model or [MODEL]))
    pools = [pooling for pooling in _names(poolings) if choose("pooling", pooling, {"mean": True, "max": True})]
    _check_output(out)
    device = checked(ComputeParams, "mdc probe", device=device).device
    sets, chosen = [open_labelled(name) for name in dict.fromkeys(data)], dist.pick_device(device)
    with dist.process_group(chosen, timeout_s=3600):
        encoders = encoders_of(models, pools or ["mean"], layer, floors, chosen, seed)
        check_encoders(encoders, sets, cache, attentive)
        results = [probe_all(encoders, each, p, counts, cache, chosen, attentive) for each in sets]
        is_main = dist.is_main()
    if is_main:
        show(*map(probe_table, results))
        for warning in (f"{each['data']}: {line}" for each in results for line in each["warnings"]):
            typer.echo(f"warning: {warning}", err=True)
        if out is not None:
            write_results(out, {"sets": results}, {"models": models, "shots": counts, "protocol": _protocol(p)})


def _protocol(p: EvaluateParams) -> dict[str, Any]:
    return {name: value for name, value in p if name.startswith("probe_") or name in ("knn_k", "seed")}


def _check_output(out: Path | None, made: str = "manifest.json", name: str = "--out") -> None:
    """Tell before the work, not after it, where a folder cannot be written or holds what we did not make.

    made: a file by which a folder that we made is known. name: of the option or argument.
    """
    if out is None:
        return
    if out.exists() and not (out / made).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{name} {out} holds what this command did not make, and would be replaced; name another folder"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"{name} {out} cannot be made: {error.strerror}; name a folder that can be written") from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in _names(text)]
    except ValueError:
        raise UserError(f"{text!r} is no list of numbers with commas between") from None


def _counts(text: str, option: str) -> list[int]:
    """Whole numbers from 1, each once."""
    if wrong := [name for name in _names(text) if not name.isdecimal() or int(name) < 1]:
        raise UserError(f"{option} {text}: {wrong[0]!r} is no whole number from 1; write some with commas between")
    return list(dict.fromkeys(map(int, _names(text))))


@app.command()
def retrieve(
    references: Annotated[Path, typer.Argument(help="Captions, in a file of COCO's kinds.")],
    images: Annotated[Path, typer.Option(help="Folder with the pictures.")],
    model: AnyModel = MODEL,
    scorer: Annotated[str, typer.Option(help="Empty = the one that fits the model best.")] = "",
    draws: Annotated[int, typer.Option(min=2, help="Of the scorer mc: masks per caption.")] = 32,
    limit: Annotated[int, typer.Option(min=1, help="The first so many pictures.")] = 1000,
    seed: int = 0,
    out: Output = None,
) -> None:
    """Find texts for pictures and pictures for texts: recall at 1, 5 and 10, with PMI and chance."""
    from mdc.eval import commands
    from mdc.eval.references import read_references
    from mdc.eval.tables import retrieval_table
    from mdc.terminal import show

    _check_output(out)
    loaded, wanted = _comparer(model, scorer)
    results = commands.retrieve(loaded, read_references(references, images, limit=limit), wanted[0], draws, seed)
    show(retrieval_table(results))
    if out is not None:
        facts = {
            "model": model,
            "fingerprint": loaded.fingerprint,
            "file": references.name,
            "draws": draws,
            "seed": seed,
        }
        commands.write_results(out, results, facts)


@app.command()
def zeroshot(
    data: Labelled,
    model: AnyModel = MODEL,
    classes: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with a name per class and line, in order.")
    ] = None,
    template: Annotated[list[str] | None, typer.Option(help="With {} for the class; several are averaged.")] = None,
    scorer: Annotated[str, typer.Option(help="Empty = the one that fits the model best.")] = "",
    draws: Annotated[int, typer.Option(min=2, help="Of the scorer mc: masks per caption.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many test pictures.")] = None,
    seed: int = 0,
    out: Output = None,
) -> None:
    """Tell the class of test pictures by the classes' names alone, with PMI and the blind answer beside it."""
    from mdc.eval import commands
    from mdc.eval.labelled import open_labelled
    from mdc.eval.tables import zero_shot_table
    from mdc.terminal import show

    _check_output(out)
    loaded, wanted = _comparer(model, scorer)
    labelled, templates = open_labelled(data), template or ["a photo of a {}"]
    names = classes.read_text(encoding="utf-8").split("\n") if classes is not None else labelled.classes
    names = [name for name in names if name.strip()]
    results = commands.zero_shot(loaded, labelled, names, templates, wanted[0], draws, seed, limit)
    show(zero_shot_table(results))
    if out is not None:
        facts = {"model": model, "fingerprint": loaded.fingerprint, "templates": templates, "seed": seed}
        commands.write_results(out, results, facts)


Index = Annotated[Path, typer.Option("--index", help="Folder of the index.")]
INDEX = Path("outputs/features/index")
index_app = typer.Typer(help="Keep an index of pictures: add and remove.", no_args_is_help=True)
app.add_typer(index_app, name="index")


def _vectors(model: str, pictures: list[Path], layer: int | None) -> tuple[Any, str]:
    """Features of pictures, and what an index calls their origin."""
    import mdc

    if layer is None:
        loaded = mdc.load(model)
        return loaded.encode(pictures).numpy(), loaded.fingerprint
    ours = _captioner(model)
    return ours.encode(pictures, layer=layer).numpy(), ours.loaded.mark(layer)


@app.command()
def search(
    pictures: Annotated[list[Path], typer.Argument(help="Pictures to look for.")],
    index: Index = INDEX,
    model: AnyModel = MODEL,
    neighbours: Annotated[int, typer.Option("-k", min=1, help="Of each picture.")] = 10,
    layer: Layer = None,
) -> None:
    """Find the pictures whose features are nearest, by cosine."""
    from mdc.eval.index import CosineIndex

    vectors, mark = _vectors(model, pictures, layer)
    similarities, uids = CosineIndex.load(index).search(vectors, neighbours, mark)
    for picture, row, names in zip(pictures, similarities.tolist(), uids.tolist(), strict=True):
        for similarity, uid in zip(row, names, strict=True):
            typer.echo(f"{picture}\t{similarity:.4f}\t{uid}")


@index_app.command()
def add(
    pictures: Annotated[list[Path], typer.Argument(help="Pictures; their path as given is their uid.")],
    index: Index,
    model: AnyModel = MODEL,
    layer: Layer = None,
) -> None:
    """Add pictures to an index, which is made if there is none."""
    from mdc.eval.index import CURRENT, CosineIndex

    _check_output(index, CURRENT, "--index")
    uids, (vectors, mark) = list(map(str, pictures)), _vectors(model, pictures, layer)
    if (index / CURRENT).is_file():
        grown = CosineIndex.load(index).add(uids, vectors, mark)
    else:
        grown = CosineIndex.build(uids, vectors, mark)
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

    _check_output(out, name="OUT")
    export_encoder(loaded_model(model), out, onnx)
    typer.echo(f"{out}: see README.md there for how to open it")


data = typer.Typer(help="What the pairs are, and where they lie.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("stats")
def data_stats(params: ParamsFile = Path("params.yaml")) -> None:
    """Show what became of the list: coverage, reasons, hosts, sizes, lengths and duplicates."""
    from mdc.config import load_params
    from mdc.data.stats import read_stats
    from mdc.report.data_tables import data_tables, duplicate_sentence
    from mdc.report.tables import terminal
    from mdc.stages import Folders
    from mdc.terminal import show

    at = Folders.of(load_params(params).paths)
    stats = read_stats(at.downloaded, at.captions, at.shards)
    show(*map(terminal, data_tables(stats)))
    if stats.duplicates:
        typer.echo(duplicate_sentence(stats))


@data.command("retry")
def data_retry(params: ParamsFile = Path("params.yaml")) -> None:
    """Ask again for pictures that failed for a reason that may pass (timeout, 429, 5xx, ...), and for no others.

    With DVC, `dvc commit download` then says that the new folder is meant, or use `dvc repro --force download`.
    """
    from mdc.config import load_params
    from mdc.data.download import settings
    from mdc.files import read_manifest
    from mdc.stages import Folders, run_stage

    given = load_params(params)
    folder = Folders.of(given.paths).downloaded
    before = read_manifest(folder, made_by="download")
    if before["inputs"].get("identity", {}).get("settings") != settings(given.download):
        raise UserError(f"{folder} was downloaded with other parameters; `mdc stage download` starts anew")
    run_stage("download", given)
    counts = [manifest["counts"] for manifest in (before, read_manifest(folder, made_by="download"))]
    came = counts[1]["ok"] - counts[0]["ok"]
    typer.echo(
        f"{folder}: asked again for {counts[0]['retryable']}, {came} came, {counts[1]['retryable']} may yet come"
    )


@data.command("subset")
def data_subset(
    pairs: Annotated[int, typer.Argument(help="Training pairs to take.")],
    folder: Annotated[Path, typer.Argument(help="Folder to make, as data-5m/shards.")],
    params: ParamsFile = Path("params.yaml"),
) -> None:
    """Write a list of some of the training pairs over the same shards, which are not copied.

    The same pairs as `pretrain.data_share` takes. Smaller subsets lie within larger ones.
    """
    from mdc.config import load_params
    from mdc.data.subset import write_subset
    from mdc.stages import Folders, check_output

    check_output(folder)
    counts = write_subset(Folders.of(load_params(params).paths).shards, pairs, folder)
    typer.echo(f"{folder}: {', '.join(f'{split} {count}' for split, count in counts.items())}")


@data.command("fetch")
def data_fetch(params: ParamsFile = Path("params.yaml")) -> None:
    """Copy shards that lie at a URL (`shard.target`) to this machine, where training reads them."""
    from mdc.config import load_params
    from mdc.data.shards import read_index
    from mdc.data.storage import fetch
    from mdc.stages import Folders

    shards = Folders.of(load_params(params).paths).shards
    typer.echo(f"{fetch(shards, read_index(shards), typer.echo)}: all shards are here")


def main() -> None:
    """Entry point: a user's mistake is one clear message and exit code 2, a failed training one and 1: no traceback."""
    try:
        on_ctrl_c(signal.default_int_handler)  # see `mdc.start`
        app()
    except (UserError, TrainingFailed) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if error.errno not in PLACES or error.filename is None:
            raise
        typer.echo(f"error: {error.filename}: {error.strerror}; take another place, or change who may write", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
