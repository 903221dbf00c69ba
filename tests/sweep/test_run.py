"""Whole sweeps of tiny models on real shards, tracked in a real MLflow."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from labelled_world import write_world
from mlflow import MlflowClient
from mlflow.entities import Run
from rich.console import Console

from mdc.config import Params, SweepPlan, load_sweep
from mdc.errors import Terminated, TrainingFailed, UserError
from mdc.eval.measures import summarise
from mdc.files import read_json
from mdc.stages import Folders
from mdc.sweep.finished import stages_left
from mdc.sweep.run import run_sweep
from mdc.sweep.table import SweepTable, collect, terminal_tables
from mdc.train import launch
from mdc.train.trainer import Trainer, train

PARAMS = """
paths: {data: ., outputs: outputs, runs: runs}
caption: {max_tokens: 6}
pretrain:
  image_size: 8
  encoder_options: {patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}
  decoder_width: 16
  decoder_depth: 1
  decoder_heads: 2
  embed_dim: 8
  steps: 3
  warmup_steps: 1
  batch_size: 8
  checkpoint_every: 1
extract: {batch_size: 36, pixel_size: 4}
evaluate:
  probe_epochs: 2
  probe_seeds: 1
  probe_weight_decays: [0.01]
  compositional_draws: 2
  swaps: {colour: [[red, green, blue]]}
  caption_length: 4
  metric_lengths: [4]
  metric_pictures: 4
  pictures: 2
compute: {device: cpu, workers: 0}
tracking: {uri: "sqlite:///FOLDER/mlflow.db"}
"""
SWEEP = "grid: {pretrain.objective: [mdc, siglip]}\nseeds: [0, 1]\n"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with shards and an empty MLflow database."""
    folder = tmp_path_factory.mktemp("template")
    write_world(folder)
    (folder / "try.yaml").write_text(SWEEP)
    MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_experiments()
    return folder


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    subprocess.run(["cp", "-r", f"{template}/.", str(tmp_path)], check=True)
    (tmp_path / "params.yaml").write_text(PARAMS.replace("FOLDER", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Params]:
    """Train in this process, without torchrun; the parameters of each training."""
    calls: list[Params] = []

    def pretrain(params: Params, shards: Path, output: Path, runs: Path) -> None:
        calls.append(params)
        try:
            train(params, shards, output, runs)
        except SystemExit:
            raise Terminated from None

    monkeypatch.setattr(launch, "pretrain", pretrain)
    return calls


def plan() -> SweepPlan:
    return load_sweep(Path("try.yaml"), Path("params.yaml"))


def sweep() -> tuple[SweepTable, list[str], list[str]]:
    """The table, the failures, and the lines of progress."""
    said: list[str] = []
    table, failures = run_sweep(plan(), Path("try.yaml"), said.append)
    return table, failures, said


def tracked() -> tuple[Run, list[Run]]:
    """The parent run and those below it, the first one first."""
    client = MlflowClient(f"sqlite:///{Path.cwd() / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()], order_by=["start_time ASC"])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} <= {parent.info.run_id}
    return parent, children


def test_a_sweep_from_its_file_to_its_table(project: Path, trained: list[Params]) -> None:
    table, failures, said = sweep()
    assert failures == []
    assert [line.split(", about")[0] for line in said] == [
        f"try: run {n} of 4: objective={name}, seed {seed}"
        for n, (name, seed) in enumerate([("mdc", 0), ("mdc", 1), ("siglip", 0), ("siglip", 1)], start=1)
    ]
    metrics = [
        read_json(project / "outputs" / "sweeps" / "try" / "objective=siglip" / f"seed-{n}/evaluation/metrics.json")
        for n in (0, 1)
    ]
    row = table.rows[1]
    assert (row.cell, row.seeds) == ("objective=siglip", [0, 1])
    assert row.values["probe_balanced"] == [m["probe"]["model"]["balanced_accuracy"] for m in metrics]
    assert row.values["untrained"] == [m["probe"]["untrained"]["accuracy"] for m in metrics]
    assert row.values["compositional"] == [m["compositional"]["all"]["cosine"] for m in metrics]
    assert row.values["knn"] == [m["knn"]["model"]["10"]["balanced_accuracy"] for m in metrics]
    assert all(seconds > 0 for seconds in row.values["seconds"])

    folder = project / "outputs" / "sweeps" / "try"
    floors = {name: {file.stat().st_ino for file in folder.rglob(f"{name}.npy")} for name in ("pixels", "untrained")}
    assert {name: len(made) for name, made in floors.items()} == {"pixels": 1, "untrained": 2}, "one for each seed"
    mean, low, high = summarise(row.values["pmi"])
    with (folder / "table.csv").open(newline="") as file:
        line = list(csv.DictReader(file))[1]
    assert (line["cell"], line["seeds"]) == ("objective=siglip", "2")
    assert [float(line[f"pmi_{part}"]) for part in ("mean", "low", "high")] == pytest.approx(
        [mean, low, high], abs=1e-5
    )
    assert read_json(folder / "table.json")["cells"][1]["measures"]["pmi"]["values"] == row.values["pmi"]
    assert "| objective=siglip | 2 | " in (folder / "table.md").read_text()
    console = Console(width=80)
    with console.capture() as captured:
        for shown in terminal_tables(table):
            console.print(shown)
    assert "…" not in captured.get()
    for name in ("probe_balanced", "pixels", "untrained_balanced", "blind"):
        assert f"{100 * sum(row.values[name]) / 2:.1f}" in captured.get()

    parent, children = tracked()
    assert (parent.info.run_name, parent.info.status) == ("try", "FINISHED")
    artifacts = MlflowClient(f"sqlite:///{Path.cwd() / 'mlflow.db'}").list_artifacts(parent.info.run_id)
    assert [a.path for a in artifacts] == ["table.csv", "table.json", "table.md", "try.yaml"]
    assert [run.info.run_name for run in children] == [
        f"try: objective={name}, seed {seed}" for name in ("mdc", "siglip") for seed in (0, 1)
    ]
    assert all(run.info.status == "FINISHED" and "probe/model/accuracy" in run.data.metrics for run in children)

    again, _, said = sweep()
    assert (len(trained), said) == (4, ["try: 4 of 4 runs were finished before"])
    assert again == table
    assert tracked()[0].info.run_id == parent.info.run_id
    assert len(tracked()[1]) == 4


def test_only_what_is_out_of_date_is_run_again(project: Path, trained: list[Params]) -> None:
    (project / "try.yaml").write_text("seeds: [0]\n")
    sweep()
    (run,) = plan().runs
    assert stages_left(run.params) == []
    changes: list[tuple[dict[str, Any], list[str]]] = [
        ({"evaluate": {"probe_epochs": 3}}, ["evaluate"]),
        ({"extract": {"pixel_size": 3}}, ["extract", "evaluate"]),
        ({"pretrain": {"lr": 0.5}}, ["pretrain", "extract", "evaluate"]),
        ({"pretrain": {"checkpoint_every": 2}, "compute": {"workers": 1}, "tracking": {"uri": ""}}, []),
    ]
    for change, left in changes:
        (project / "try.yaml").write_text(f"base: {change}\n".replace("'", '"'))
        (changed,) = plan().runs
        assert stages_left(changed.params) == left, change
        assert collect(plan()).rows[0].seeds == ([0] if not left else [])
    at = Folders.of(run.params.paths)
    (at.features / "manifest.json").unlink()
    assert stages_left(run.params) == ["extract", "evaluate"]
    (at.shards / "manifest.json").write_text('{"inputs": {}}')
    assert stages_left(run.params) == ["pretrain", "extract", "evaluate"]


def test_a_stopped_training_goes_on_and_finished_ones_stay(
    project: Path, trained: list[Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = Trainer._gradients
    starts: list[int] = []

    def stopping(trainer: Trainer, batches: Any) -> Any:
        if len(trained) == 2 and trainer.done == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(trainer, batches)

    monkeypatch.setattr(Trainer, "_gradients", stopping)
    with pytest.raises(Terminated):
        sweep()
    monkeypatch.setattr(Trainer, "_gradients", gradients)
    assert tracked()[0].info.status == "KILLED"
    assert "| objective=mdc | 1 of 2 |" in (project / "outputs/sweeps/try/table.md").read_text()
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda trainer: (starts.append(trainer.done), run(trainer)))
    trained.clear()
    table, _, said = sweep()
    assert said[:2] == ["try: 1 of 4 runs were finished before", "try: run 1 of 3: objective=mdc, seed 1"]
    assert starts == [2, 0, 0]
    assert [row.seeds for row in table.rows] == [[0, 1], [0, 1]]
    parent, children = tracked()
    assert (parent.info.status, len(children)) == ("FINISHED", 4)


def test_a_training_that_fails_is_told_and_the_others_go_on(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretrain(params: Params, shards: Path, output: Path, runs: Path) -> None:
        if params.pretrain.objective == "mdc":
            raise TrainingFailed("rank 0 failed: the loss is not finite")
        train(params, shards, output, runs)

    monkeypatch.setattr(launch, "pretrain", pretrain)
    (project / "try.yaml").write_text(SWEEP.replace("[0, 1]", "[0]"))
    table, failures, _ = sweep()
    assert failures == ["objective=mdc, seed 0: rank 0 failed: the loss is not finite"]
    assert [row.seeds for row in table.rows] == [[], [0]]
    assert "| objective=mdc | 0 of 1 | – |" in (project / "outputs/sweeps/try/table.md").read_text()
    assert tracked()[0].info.status == "FAILED"


def test_without_a_server_the_sweep_goes_on_and_if_required_it_does_not_start(
    project: Path, trained: list[Params]
) -> None:
    (project / "try.yaml").write_text("base: {tracking: {uri: 'http://127.0.0.1:9', required: true}}\n")
    with pytest.raises(UserError, match=r"tracking\.required is true"):
        sweep()
    (project / "try.yaml").write_text("base: {tracking: {uri: ''}}\n")
    table, _, _ = sweep()
    assert table.rows[0].seeds == [0]
    assert [params.tracking.parent_run for params in trained] == [""]


def test_no_shards_yet(project: Path) -> None:
    (project / "shards" / "manifest.json").unlink()
    with pytest.raises(UserError, match="run `mdc stage shard`"):
        sweep()
    assert not (project / "outputs").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from mdc.config import load_sweep
from mdc.sweep.run import run_sweep
from mdc.train import launch
from mdc.train.trainer import Trainer, train

torch.set_num_threads(1)
gradients = Trainer._gradients

def stopping(trainer, batches):
    if trainer.hyper.seed == 1 and trainer.done == 2:
        trainer.writer.wait()  # for the checkpoint of this step
        os.kill(os.getpid(), signal.SIGKILL)
    return gradients(trainer, batches)

Trainer._gradients = stopping
launch.pretrain = train
run_sweep(load_sweep(Path("try.yaml"), Path("params.yaml")), Path("try.yaml"), print)
"""


def test_a_killed_sweep_goes_on_where_it_was(
    project: Path, trained: list[Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run, starts = Trainer.run, []
    monkeypatch.setattr(Trainer, "run", lambda trainer: (starts.append(trainer.done), run(trainer)))
    _, failures, said = sweep()
    assert failures == []
    assert said[:2] == ["try: 1 of 4 runs were finished before", "try: run 1 of 3: objective=mdc, seed 1"]
    assert starts == [2, 0, 0]
    parent, children = tracked()
    assert [run.info.status for run in (parent, *children)] == ["FINISHED"] * 5


@pytest.mark.slow
def test_the_command_itself(project: Path) -> None:
    """The real thing: torchrun below the command, SIGTERM in the middle, and the same command once more."""
    command = [str(Path(sys.executable).parent / "mdc"), "sweep", "try.yaml"]
    (project / "try.yaml").write_text("base: {pretrain: {steps: 200, checkpoint_every: 20}}\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    until(lambda: list(project.glob("runs/sweeps/try/base/seed-0/pretrain-*/step-*")))
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=120)
    assert first.returncode == 143
    assert "error: sweep try was told to end; run the same command to continue" in said
    second = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert second.returncode == 0, second.stderr
    assert "taken up again at step" in second.stderr
    assert "table.md, .csv and .json" in second.stdout
    parent, (child,) = tracked()
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
