"""Real ranks under torchrun, on the CPU. Starting one takes seconds, so each test looks at several things."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mdc import files
from mdc.config import Params
from mdc.errors import UserError
from mdc.processes import Terminated
from mdc.train import launch
from mdc.train.checkpoint import step_folders
from mdc.train.trainer import train
from mdc.train.work import RUN, work_folder

MakeParams = Callable[..., Params]
HERE = Path(__file__).parent


def rows(model: Path) -> list[dict[str, float]]:
    with (model / "loss.csv").open(newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`fault("1:2:raise")`: rank 1 raises in step 2."""

    def arrange(what: str) -> None:
        monkeypatch.setattr(launch, "TARGET", "faulty")
        monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        monkeypatch.setenv("FAULT", what)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return arrange


@pytest.fixture
def no_child_left() -> Iterator[None]:
    """Every process that the test started has ended with it; helpers of earlier tests may live on."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - before


def status(params: Params, run_id: str) -> str:
    from mlflow import MlflowClient

    return MlflowClient(params.tracking.uri).get_run(run_id).info.status


def test_two_ranks_stopped_and_taken_up_by_one_give_the_losses_of_one(
    tmp_path: Path, shards: Path, small_params: MakeParams, fault: Callable[[str], None]
) -> None:
    options = {"steps": 6, "accumulate": 2}
    train(small_params(**options), shards, tmp_path / "one", tmp_path / "runs")
    fault("0:3:stop")
    with pytest.raises(Terminated):
        launch.pretrain(small_params(**options, compute={"processes": 2}), shards, tmp_path / "two", tmp_path / "runs")
    work = work_folder(small_params(**options), shards, tmp_path / "runs")
    done = [int(folder.name.removeprefix("step-")) for folder in work.glob("step-*")]
    assert len(done) == 1
    assert 3 <= done[0] < 6, "the ranks finish the step that they are in, or one more"
    train(small_params(**options), shards, tmp_path / "two", tmp_path / "runs")
    assert len(rows(tmp_path / "two")) == 6
    for row, expected in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_contrastive_ranks_share_their_negatives(
    tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"objective": "clip", "steps": 4}
    train(small_params(**options), shards, tmp_path / "one", tmp_path / "runs")
    launch.pretrain(small_params(**options, compute={"processes": 2}), shards, tmp_path / "two", tmp_path / "runs")
    for row, expected in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("no_child_left")
def test_a_failing_rank_ends_all_and_is_named(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    fault: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    fault("1:2:raise")
    params = small_params(compute={"processes": 2, "restarts": 0})
    with pytest.raises(launch.TrainingFailed, match=r"rank 1 .*RuntimeError: the fault that was asked for"):
        launch.pretrain(params, shards, tmp_path / "model", tmp_path / "runs")
    output = capfd.readouterr().err
    assert output.count("Traceback") == 1, "the first failure, without what followed from it"
    assert "faulty.py" in output


def test_a_killed_rank_ends_all_and_its_run_is_marked(
    tmp_path: Path, shards: Path, small_params: MakeParams, database: str, fault: Callable[[str], None]
) -> None:
    """The rank that writes the run is killed, so that the launcher must close it."""
    fault("0:2:kill")
    params = small_params(compute={"processes": 2, "restarts": 0}, tracking={"uri": database, "required": True})
    with pytest.raises(launch.TrainingFailed, match=r"rank 0 \(process \d+\) was killed by SIGKILL"):
        launch.pretrain(params, shards, tmp_path / "model", tmp_path / "runs")
    run = files.read_json(work_folder(params, shards, tmp_path / "runs") / RUN)
    assert run["status"] == status(params, run["run_id"]) == "FAILED"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told_before_a_rank_starts(
    tmp_path: Path, shards: Path, small_params: MakeParams
) -> None:
    params = small_params(compute={"device": "cuda", "restarts": 2})
    with pytest.raises(UserError, match=r"compute.device is 'cuda' but this machine shows no GPU"):
        launch.pretrain(params, shards, tmp_path / "model", tmp_path / "runs")


@pytest.mark.usefixtures("no_child_left")
def test_a_silent_rank_is_given_up_after_the_timeout(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault("1:2:sleep")
    monkeypatch.setattr("mdc.ranks.SHUTDOWN_S", 1)
    params = small_params(compute={"processes": 2, "rank_timeout": 3.0, "restarts": 0})
    with pytest.raises(launch.TrainingFailed, match=r"rank 0 .*another rank was silent for compute.rank_timeout = 3 s"):
        launch.pretrain(params, shards, tmp_path / "model", tmp_path / "runs")


def start(params: Params, shards: Path, folder: Path, target: str = launch.TARGET) -> "subprocess.Popen[bytes]":
    """The launcher in a process group of its own, training into `folder`/model. target: what ranks run."""
    (folder / "params.json").write_text(params.model_dump_json())
    code = (
        f"import sys; from pathlib import Path; from mdc.train import launch; launch.TARGET = {target!r}\n"
        "launch.pretrain(*map(Path, sys.argv[1:]))"
    )
    paths = [folder / "params.json", shards, folder / "model", folder / "runs"]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, paths)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_ctrl_c_ends_ranks_that_wait_for_one_another(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    fault: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first step there is nothing to save, and no common step that they could end after."""
    fault("1:0:late")
    monkeypatch.setenv("MET", str(tmp_path / "met"))
    launcher = start(small_params(compute={"processes": 2}), shards, tmp_path, target="faulty")
    deadline = time.monotonic() + 120
    while not ((tmp_path / "met").exists() and (tmp_path / "met-late").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    os.killpg(launcher.pid, signal.SIGINT)
    _, output = launcher.communicate(timeout=30)
    assert ranks
    assert not psutil.wait_procs(ranks, timeout=5)[1]
    assert output.count(b"Traceback") == 1, "that of the launcher's own script"


def wait_for_checkpoint(work: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not step_folders(work):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_same_weights(model: Path, expected: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (model, expected))
    for name, weights in ours.items():
        torch.testing.assert_close(weights, theirs[name], atol=1e-6, rtol=0)


def test_two_ranks_killed_and_taken_up_by_one_give_the_weights_of_an_undisturbed_run(
    tmp_path: Path, shards: Path, small_params: MakeParams
) -> None:
    options = {"steps": 60, "lr": 1e-4, "checkpoint_every": 5, "validate_every": 60}
    two = small_params(**options, compute={"processes": 2})
    work = work_folder(two, shards, tmp_path / "runs")
    launcher = start(two, shards, tmp_path)
    wait_for_checkpoint(work, launcher)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    assert step_folders(work), "it was killed in mid-training"
    train(small_params(**options, compute={"workers": 1}), shards, tmp_path / "model", tmp_path / "runs")
    train(small_params(**options), shards, tmp_path / "undisturbed", tmp_path / "other-runs")
    assert_same_weights(tmp_path / "model", tmp_path / "undisturbed")


def test_a_rank_that_is_lost_is_followed_by_another_try(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    options = {"steps": 300, "lr": 1e-4, "checkpoint_every": 10, "validate_every": 300, "log_every": 100}
    params = small_params(**options, compute={"processes": 2, "restarts": 1})
    work = work_folder(params, shards, tmp_path / "runs")
    launcher = start(params, shards, tmp_path)
    wait_for_checkpoint(work, launcher)
    psutil.Process(launcher.pid).children()[0].kill()
    _, output = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert re.search(rb"; again from the checkpoint of step \d+ \(1 of 1\)", output)
    assert b"taken up again at step" in output
    train(small_params(**options), shards, tmp_path / "undisturbed", tmp_path / "other-runs")
    assert_same_weights(tmp_path / "model", tmp_path / "undisturbed")


@pytest.mark.parametrize(("kind", "failure"), [("nan", launch.TrainingFailed), ("mistake", UserError)])
def test_what_would_come_again_is_not_tried_again(
    tmp_path: Path,
    shards: Path,
    small_params: MakeParams,
    fault: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
    kind: str,
    failure: type[Exception],
) -> None:
    fault("0:2:nan" if kind == "nan" else "0:99:none")
    params = small_params(batch_size=8 if kind == "nan" else 512, compute={"restarts": 5})
    with pytest.raises(failure):
        launch.pretrain(params, shards, tmp_path / "model", tmp_path / "runs")
    assert "of 5)" not in capfd.readouterr().err


def test_tries_are_counted_from_the_newest_checkpoint(
    tmp_path: Path, shards: Path, small_params: MakeParams, caplog: pytest.LogCaptureFixture
) -> None:
    """A training that gets on may fail any number of times; one that does not, ends."""
    params = small_params(compute={"restarts": 2})
    work, tries = tmp_path / "pretrain-0", iter([10, 20, 30, 30, 30, 40])

    def attempt() -> Exception:
        (work / f"step-{next(tries):08d}").mkdir(parents=True, exist_ok=True)
        return launch.TrainingFailed("lost")

    with pytest.raises(launch.TrainingFailed):
        launch._persevere(params, work, attempt, lambda: False)
    assert list(tries) == [40]
    # done on another host, while the connection to it broke off here
    launch._persevere(params, work, lambda: launch.MeetingLost("gone"), lambda: True)
    assert [record.args[-2] for record in caplog.records] == [1, 1, 1, 2]  # type: ignore[index]


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path, shards: Path, small_params: MakeParams) -> None:
    """And with nobody to tell them, they still save a checkpoint."""
    params = small_params(steps=100_000, checkpoint_every=100_000)
    launcher = start(params, shards, tmp_path)
    assert launcher.stderr is not None
    heard = b""
    while b" 1" not in heard.partition(b"pretrain:")[2].replace(b"100000", b""):  # until the bar moves
        heard += os.read(launcher.stderr.fileno(), 1000)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    _, left = psutil.wait_procs(ranks, timeout=30)
    assert ranks
    assert not left
    deadline = time.monotonic() + 5
    work = work_folder(params, shards, tmp_path / "runs")
    while not list(work.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(list(work.glob("step-*"))) == 1
