"""The seven stages by name: what each reads, runs and makes. `mdc stage NAME` and so `dvc.yaml` end here.

A stage reads folders and writes one folder, whose manifest comes last. Work that must survive (half a download,
checkpoints) lies under `runs/`, in a folder named by a fingerprint of all that the work depends on: DVC deletes outputs
before it reruns a stage, and a change of data or parameters must not resume from work done for others.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdc.config import STAGES as NAMES
from mdc.config import Params, PathParams, choose
from mdc.errors import UserError
from mdc.files import MANIFEST, fingerprint, read_json, read_manifest, read_whole
from mdc.processes import end_children, is_first_rank, only_writer, raise_on_sigterm

LOCK_PATIENCE_S = 5.0
GRACE_S = 5.0  # for worker processes of a stage that is ended


@dataclass(frozen=True)
class Folders:
    """What lies where. Every stage but the first reads folders of earlier ones; each writes one."""

    downloaded: Path
    captions: Path
    shards: Path
    model: Path
    features: Path
    evaluation: Path
    report: Path
    runs: Path

    @classmethod
    def of(cls, paths: PathParams) -> "Folders":
        data, outputs = Path(paths.data), Path(paths.outputs)
        return cls(
            downloaded=data / "downloaded",
            captions=data / "captions",
            shards=data / "shards",
            model=outputs / "model",
            features=outputs / "features",
            evaluation=outputs / "evaluation",
            report=outputs / "report",
            runs=Path(paths.runs),
        )

    def work(self, stage: str, depends_on: Mapping[str, Any]) -> Path:
        """The folder for unfinished work of `stage`: another one as soon as anything it depends on changes."""
        return self.runs / f"{stage}-{fingerprint(dict(depends_on))}"


def _download(params: Params, at: Folders) -> None:
    from mdc.data.download import download, settings

    download(params.download, params.compute, at.work("download", settings(params.download)), at.downloaded)


def _caption(params: Params, at: Folders) -> None:
    from mdc.data.captions import prepare_captions

    prepare_captions(params.caption, at.downloaded, at.captions, at.runs / "caption", params.compute)


def _shard(params: Params, at: Folders) -> None:
    from mdc.data.packing import write_shards

    write_shards(params.shard, at.downloaded, at.captions, at.shards, at.runs / "shard", params.compute)


def _pretrain(params: Params, at: Folders) -> None:
    from mdc.train.launch import pretrain

    pretrain(params, at.shards, at.model, at.runs)


def _extract(params: Params, at: Folders) -> None:
    from mdc.eval.features import extract_features

    extract_features(params, at.shards, at.model, params.paths.kept, at.features)


def _evaluate(params: Params, at: Folders) -> None:
    from mdc.eval.evaluate import evaluate
    from mdc.train.tracking import log_evaluation

    evaluate(params, at.shards, at.model, at.features, at.evaluation)
    model, features = read_manifest(at.model, made_by="pretrain"), read_manifest(at.features, made_by="extract")
    metrics = read_json(at.evaluation / "metrics.json")
    log_evaluation(params, model["fingerprint"], metrics, model["counts"]["images"], features.get("layer"))


def _report(params: Params, at: Folders) -> None:
    from mdc.report.page import write_report
    from mdc.train.tracking import log_report

    write_report(params, at.downloaded, at.captions, at.shards, at.model, at.features, at.evaluation, at.report)
    log_report(params, read_manifest(at.model, made_by="pretrain")["fingerprint"], at.report / "report.html")


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline."""

    run: Callable[[Params, Folders], None]
    output: Callable[[Folders], Path]  # the one folder it makes
    reads: tuple[str, ...] = ()  # the stages whose folders it reads
    unread: tuple[str, ...] = ()  # endings of their files whose contents it compares itself, in its preflight
    shared: bool = False  # whether it may be run by all ranks that torchrun starts, of which the first writes


STAGES: dict[str, Stage] = {
    "download": Stage(_download, lambda at: at.downloaded),
    "caption": Stage(_caption, lambda at: at.captions, ("download",)),
    "shard": Stage(_shard, lambda at: at.shards, ("download", "caption")),
    "pretrain": Stage(_pretrain, lambda at: at.model, ("shard",), unread=(".tar",)),
    "extract": Stage(_extract, lambda at: at.features, ("shard", "pretrain"), shared=True),
    "evaluate": Stage(_evaluate, lambda at: at.evaluation, ("shard", "pretrain", "extract")),
    "report": Stage(_report, lambda at: at.report, ("download", "caption", "shard", "pretrain", "extract", "evaluate")),
}
assert tuple(STAGES) == NAMES


def _check_inputs(stage: Stage, params: Params, at: Folders) -> None:
    """Raise UserError where a folder that the stage reads is missing or is not as it was written."""
    unread = stage.unread if params.compute.preflight else ()  # nothing large is read twice
    for name in stage.reads:
        read_whole(STAGES[name].output(at), made_by=name, unread=unread)


def check_output(output: Path) -> None:
    """Raise UserError where a stage would replace files that are not its own."""
    if output.is_dir() and not (output / MANIFEST).is_file() and (foreign := sorted(output.iterdir())):
        raise UserError(
            f"{output} holds files that no stage made, such as {foreign[0].name}, and would be replaced; move them, "
            "or set paths.data or paths.outputs to another folder"
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made ({error.strerror}); set paths.data, paths.outputs and paths.runs to folders that "
            "can be written"
        ) from None


@contextmanager
def _place(folder: Path) -> Iterator[None]:
    """Make `folder`; an error leaves a new one only where something lies in it."""
    new = not folder.exists()
    _make(folder)
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _children_ended() -> Iterator[None]:
    """An error ends all processes below this one."""
    try:
        yield
    except BaseException:
        end_children(GRACE_S)
        raise


def run_stage(name: str, params: Params) -> Path:
    """Run one stage to its end and return the folder that it made.

    Raises UserError for bad input and while another process writes the same output, TrainingFailed when a training
    does. Whatever ends the stage, SIGTERM and Ctrl-C included, its child processes end with it, and the folder is
    either whole or not there.
    """
    stage = choose("stage", name, STAGES)
    at = Folders.of(params.paths)
    output = stage.output(at)
    if stage.shared and not is_first_rank():
        with raise_on_sigterm(), _children_ended():
            stage.run(params, at)
        return output
    _make(at.runs)
    with raise_on_sigterm(), only_writer(at.runs / f"{name}.lock", str(output.absolute()), LOCK_PATIENCE_S):
        check_output(output)
        _check_inputs(stage, params, at)
        with _place(output.parent), _children_ended():
            stage.run(params, at)
    assert (output / MANIFEST).is_file(), f"stage {name} ended without {output / MANIFEST}"
    return output


def join_training(params: Params, endpoint: str, output: Path | None) -> Path:
    """Run this host's ranks of a training whose stage another process runs, and return the folder that it made.

    endpoint: HOST:PORT where the hosts meet, "" for the one of the parameters. output: another folder than the stage's,
    made for this training alone, so that there is nothing to do where it is whole.
    Raises as `run_stage` does.
    """
    from mdc.train.launch import take_part

    at = Folders.of(params.paths)
    meeting = endpoint or params.compute.endpoint
    if not meeting:
        raise UserError(
            "there is no training to take part in: set compute.launcher: hosts and compute.endpoint, or give "
            "--endpoint HOST:PORT; a training on this machine alone is `mdc stage pretrain`"
        )
    if output is not None and (output / MANIFEST).is_file():
        return output
    with raise_on_sigterm(), _children_ended():
        take_part(params, at.shards, output or at.model, at.runs, meeting)
    return output or at.model
