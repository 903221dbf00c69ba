"""Against a real MLflow: a SQLite database, servers that are dead, and one that never answers."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from mdc.config import Params
from mdc.errors import UserError
from mdc.files import read_json
from mdc.processes import tied
from mdc.train import checkpoint, tracking
from mdc.train.trainer import Trainer, train
from mdc.train.work import work_folder

MakeParams = Callable[..., Params]


def runs_of(uri: str) -> list[Run]:
    client = MlflowClient(uri)
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def history(uri: str, run: Run, name: str) -> list[tuple[int, float]]:
    points = MlflowClient(uri).get_metric_history(run.info.run_id, name)
    return [(point.step, point.value) for point in points]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """`at_step(n, act)`: `act()` is called at the beginning of step n."""
    gradients = Trainer._gradients

    def arrange(step: int, act: Callable[[], object]) -> None:
        def acting(trainer: Trainer, batches: Any) -> Any:
            if trainer.done == step:
                act()
            return gradients(trainer, batches)

        monkeypatch.setattr(Trainer, "_gradients", acting)

    return arrange


def test_a_run_holds_what_was_trained_and_how(
    tmp_path: Path, shards: Path, small_params: MakeParams, database: str
) -> None:
    params = small_params(log_every=2, tracking={"uri": database})
    train(params, shards, tmp_path / "model", tmp_path / "runs")
    (run,) = runs_of(database)
    assert run.info.status == "FINISHED"
    assert run.data.params["pretrain.lr"] == "0.01"
    assert run.data.params["pretrain.encoder_options.patch_size"] == "4"
    assert run.data.params["caption.tokenizer"] == "train"
    fingerprint = read_json(tmp_path / "model" / "manifest.json")["fingerprint"]
    assert run.data.tags["mdc.fingerprint"] == fingerprint
    assert run.data.tags["mdc.data_version"] == read_json(shards / "index.json")["version"]
    assert (run.data.tags["mdc.objective"], run.data.tags["mdc.preset"]) == ("mdc", "nano")
    assert [step for step, _ in history(database, run, "train/loss")] == [16, 32, 48, 64]
    assert [step for step, _ in history(database, run, "validation/loss")] == [32, 64]
    assert all(value > 0 for _, value in history(database, run, "images_per_s"))
    parts = [history(database, run, f"time/{part}") for part in ("data", "move", "compute", "save", "validate")]
    for points in zip(*parts, strict=True):
        assert sum(value for _, value in points) == pytest.approx(1)
    assert run.inputs is not None
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.digest == run.data.tags["mdc.data_version"][:16]
    assert json.loads(str(data.dataset.profile)) == {"samples": 36}
    fetched = tracking.fetch_model(f"runs:/{run.info.run_id}/model", database)
    assert checkpoint.load_model(fetched).fingerprint == fingerprint
    config = MlflowClient(database).download_artifacts(run.info.run_id, "config.json")
    assert Params.model_validate_json(Path(config).read_bytes()) == params


def test_the_status_tells_how_a_training_ended_and_a_restart_goes_on_in_its_run(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    database: str,
    at_step: Callable[[int, Callable[[], object]], None],
) -> None:
    params = small_params(checkpoint_every=2, tracking={"uri": database})

    def fail() -> None:
        raise RuntimeError("boom")

    at_step(3, fail)
    with pytest.raises(RuntimeError, match="boom"):
        train(params, shards, tmp_path / "model", tmp_path / "runs")
    assert [run.info.status for run in runs_of(database)] == ["FAILED"]
    for step, number in ((4, signal.SIGTERM), (6, signal.SIGINT)):
        at_step(step, partial(signal.raise_signal, number))
        with pytest.raises(SystemExit):
            train(params, shards, tmp_path / "model", tmp_path / "runs")
        assert [run.info.status for run in runs_of(database)] == ["KILLED"]
    params = small_params(checkpoint_every=2, compute={"workers": 1}, tracking={"uri": database})
    train(params, shards, tmp_path / "model", tmp_path / "runs")
    (run,) = runs_of(database)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(database, run, "train/loss")] == list(range(8, 65, 8)), "none twice"
    assert run.data.params["compute.workers"] == "0"
    assert run.data.tags["changed.compute.workers"] == "1"


def test_a_run_whose_process_is_gone_is_closed_by_the_next(
    tmp_path: Path, shards: Path, small_params: MakeParams, database: str
) -> None:
    client = MlflowClient(database)
    experiment = client.create_experiment("mdc", (tmp_path / "artifacts").as_uri())
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = {"mdc.host": socket.gethostname(), "mdc.process_start": "0"}
    stale = client.create_run(experiment, tags={**here, "mdc.pid": str(gone.pid)})
    elsewhere = client.create_run(experiment, tags={**here, "mdc.pid": str(gone.pid), "mdc.host": "another"})
    train(small_params(tracking={"uri": database}), shards, tmp_path / "model", tmp_path / "runs")
    assert client.get_run(stale.info.run_id).info.status == "KILLED"
    assert client.get_run(elsewhere.info.run_id).info.status == "RUNNING"


def test_scores_and_report_join_the_newest_run_of_their_model(
    tmp_path: Path, small_params: MakeParams, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = small_params(tracking={"uri": database})
    client = MlflowClient(database)
    experiment = client.create_experiment("mdc", (tmp_path / "artifacts").as_uri())
    ids = []
    for start, fingerprint in ((1, "aa"), (2, "aa"), (3, "bb")):
        run = client.create_run(experiment, start_time=start, tags={"mdc.fingerprint": fingerprint})
        client.set_terminated(run.info.run_id, "FINISHED")
        ids.append(run.info.run_id)
    tracking.log_evaluation(params, "aa", {"probe": {"model": {"accuracy": 0.5}}, "rule": {"skin tone": 1}}, step=64)
    (tmp_path / "report.html").write_text("<p>")
    tracking.log_report(params, "aa", tmp_path / "report.html")
    older, newest, other = [client.get_run(run_id) for run_id in ids]
    assert newest.info.status == "FINISHED"
    assert newest.data.metrics == {"probe/model/accuracy": 0.5, "rule/skin tone": 1}
    assert older.data.metrics == other.data.metrics == {}
    assert [file.path for file in client.list_artifacts(ids[1], "report")] == ["report/report.html"]
    with caplog.at_level(logging.WARNING):
        tracking.log_evaluation(params, "cc", {"a": 1}, step=64)
    assert "no run in" in caplog.text


def test_long_values_are_shortened_visibly() -> None:
    long = "x" * 6001
    short = tracking.shorten(long)
    assert len(short) <= tracking.LONGEST_VALUE
    assert "6001 characters, hash " in short
    assert short != tracking.shorten("x" * 6000 + "y")
    assert tracking.shorten("x" * 500) == "x" * 500
    assert tracking.shorten(1e-4) == tracking.shorten(0.0001) == "0.0001"
    assert tracking.flatten({"a": {"b": {"c": 1}, "d": {}}}) == {"a.b.c": 1, "a.d": {}}


def test_many_and_long_parameters_are_taken(
    tmp_path: Path, shards: Path, small_params: MakeParams, database: str
) -> None:
    """More than one request holds, and a value that MLflow would cut without a word."""
    options = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    params = small_params(encoder_options=options, tracking={"uri": database})
    params = params.model_copy(
        update={"evaluate": params.evaluate.model_copy(update={"swaps": {"rule": [["word"] * 2000]}})}
    )
    data = tracking.TrackedData(shards, "abc", 1)
    tracker = tracking.Tracker(params, {}, data, None, tmp_path / "run.json", tmp_path / "unsent")
    tracker.finish("FINISHED")
    (run,) = runs_of(database)
    assert len(run.data.params) > tracking.BATCH / 2
    assert "characters, hash" in run.data.params["evaluate.swaps.rule"]


# -- outages ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield server.getsockname()[1]


@pytest.mark.parametrize("port", ["closed_port", "silent_port"])
def test_a_dead_server_costs_telemetry_and_seconds(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    port: str,
) -> None:
    uri = f"http://127.0.0.1:{request.getfixturevalue(port)}"
    start = time.monotonic()
    params = small_params(tracking={"uri": uri})
    train(params, shards, tmp_path / "model", tmp_path / "runs")
    tracking.log_evaluation(params, "aa", {"a": 1}, step=64)
    assert time.monotonic() - start < 60, "MLflow's own limits allow minutes"
    assert checkpoint.load_model(tmp_path / "model").fingerprint
    warnings = [record.getMessage() for record in caplog.records if "no answer" in record.getMessage()]
    assert len(warnings) == 2, "one for the training, one for the scores"
    unsent = (tmp_path / "runs" / f"unsent-{work_folder(params, shards, tmp_path).name}.jsonl").read_text()
    rows = [json.loads(line) for line in unsent.splitlines()]
    assert [row["step"] for row in rows if "metrics" in row] == list(range(8, 65, 8))


def test_a_required_server_must_answer_before_the_first_step(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    closed_port: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "START_PATIENCE_S", 3.0)
    params = small_params(tracking={"uri": f"http://127.0.0.1:{closed_port}", "required": True})
    with pytest.raises(UserError, match=r"tracking\.uri .* gives no answer"):
        train(params, shards, tmp_path / "model", tmp_path / "runs")
    assert "tracking.required is true, so it is needed" in caplog.text
    assert "the work goes on" not in caplog.text


@pytest.mark.parametrize("required", [False, True])
def test_a_server_that_refuses_the_run_is_told_once_and_nothing_is_lost(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    database: str,
    caplog: pytest.LogCaptureFixture,
    required: bool,
) -> None:
    """The experiment was deleted."""
    client = MlflowClient(database)
    client.delete_experiment(client.create_experiment("mdc"))
    params = small_params(tracking={"uri": database, "required": required})
    if required:
        with pytest.raises(UserError, match=r"refuses this run \(.*state is deleted.*tracking\.required is true"):
            train(params, shards, tmp_path / "model", tmp_path / "runs")
        return
    train(params, shards, tmp_path / "model", tmp_path / "runs")
    (warning,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert "must be in the 'active' state" in warning
    assert warning.endswith("the work goes on")
    unsent = (tmp_path / "runs" / f"unsent-{work_folder(params, shards, tmp_path).name}.jsonl").read_text()
    rows = [json.loads(line) for line in unsent.splitlines()]
    assert [row["step"] for row in rows if "metrics" in row] == list(range(8, 65, 8))


def test_a_restart_tells_what_the_server_has_missed(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    database: str,
    closed_port: int,
    at_step: Callable[[int, Callable[[], object]], None],
) -> None:
    """No server until a restart at step 6, from a checkpoint of step 4."""

    def fail() -> None:
        raise RuntimeError("boom")

    at_step(6, fail)
    params = small_params(checkpoint_every=4, log_every=2, tracking={"uri": f"http://127.0.0.1:{closed_port}"})
    with pytest.raises(RuntimeError, match="boom"):
        train(params, shards, tmp_path / "model", tmp_path / "runs")
    at_step(-1, fail)
    train(
        small_params(checkpoint_every=4, log_every=2, tracking={"uri": database}),
        shards,
        tmp_path / "model",
        tmp_path / "runs",
    )
    (run,) = runs_of(database)
    assert [step for step, _ in history(database, run, "train/loss")] == [16, 32, 48, 64]
    assert [step for step, _ in history(database, run, "validation/loss")] == [32, 64]


def test_steps_that_are_trained_again_are_tracked_once(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    database: str,
    at_step: Callable[[int, Callable[[], object]], None],
) -> None:
    """Steps 5 and 6 were told before the process died without a checkpoint of them."""
    params = small_params(checkpoint_every=4, tracking={"uri": database})
    train(params, shards, tmp_path / "straight", tmp_path / "straight-runs")

    def die() -> None:
        raise RuntimeError("boom")

    at_step(6, die)
    with pytest.raises(RuntimeError, match="boom"):
        train(params, shards, tmp_path / "model", tmp_path / "runs")
    (died, straight) = runs_of(database)
    assert max(step for step, _ in history(database, died, "train/loss")) == 48
    at_step(-1, die)
    train(params, shards, tmp_path / "model", tmp_path / "runs")
    assert len(runs_of(database)) == 2
    for name in ("train/loss", "validation/loss", "lr"):
        points = history(database, died, name)
        assert len(points) == len(dict(points)), "one point of each step"
        assert points == history(database, straight, name), "the numbers of an undisturbed training"


def test_what_was_stored_but_not_answered_is_not_there_twice(
    tmp_path: Path, shards: Path, small_params: MakeParams, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers to the making of the run and to its first metrics are lost."""
    lost: list[str] = []

    def lose_the_first(name: str, of: Callable[[dict[str, Any]], bool]) -> None:
        call = getattr(MlflowClient, name)

        def losing(client: MlflowClient, *arguments: Any, **named: Any) -> Any:
            answer = call(client, *arguments, **named)
            if name not in lost and of(named):
                lost.append(name)
                raise ConnectionError("the answer is lost")
            return answer

        monkeypatch.setattr(MlflowClient, name, losing)

    lose_the_first("create_run", lambda _: True)
    lose_the_first("log_batch", lambda named: "metrics" in named)
    params = small_params(tracking={"uri": database, "required": True})
    data = tracking.TrackedData(shards, "abc", 1)
    tracker = tracking.Tracker(params, {}, data, None, tmp_path / "run.json", tmp_path / "unsent")
    for step in (8, 16):
        tracker.log({"train/loss": 1.0 / step}, step)
    while len(lost) < 2 or not tracker.sender.down:
        time.sleep(0.01)
    tracker.finish("FINISHED")
    assert lost == ["create_run", "log_batch"]
    (run,) = runs_of(database)
    assert run.info.status == "FINISHED"
    assert history(database, run, "train/loss") == [(8, 1 / 8), (16, 1 / 16)]


@pytest.mark.slow
def test_what_a_server_misses_is_sent_when_it_is_back(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    database: str,
    closed_port: int,
    at_step: Callable[[int, Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed at step 5 of 20, back at step 12."""
    uri = f"http://127.0.0.1:{closed_port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(closed_port)]
    command += ["--backend-store-uri", database, "--workers", "1"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    command = tied(command)  # it ends with the tests, however they end
    servers: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        servers.append(subprocess.Popen(command, start_new_session=True))
        while socket.socket().connect_ex(("127.0.0.1", closed_port)):
            time.sleep(0.2)

    def stop() -> None:
        os.killpg(servers[-1].pid, signal.SIGKILL)
        servers[-1].wait()

    gradients = Trainer._gradients

    def acting(trainer: Trainer, batches: Any) -> Any:
        if trainer.done in (5, 12):
            (stop if trainer.done == 5 else start)()
        return gradients(trainer, batches)

    monkeypatch.setattr(Trainer, "_gradients", acting)
    start()
    try:
        params = small_params(steps=20, tracking={"uri": uri, "required": True})
        train(params, shards, tmp_path / "model", tmp_path / "runs")
        (run,) = runs_of(database)
        assert run.info.status == "FINISHED"
        assert [step for step, _ in history(database, run, "train/loss")] == list(range(8, 161, 8))
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["cost.json"], "nothing is left unsent"
        fetched = tracking.fetch_model(f"runs:/{run.info.run_id}/model", uri)
        assert checkpoint.load_model(fetched).fingerprint == run.data.tags["mdc.fingerprint"]
    finally:
        stop()
