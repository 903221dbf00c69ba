"""The shipped batch script on a real Slurm: its own daemons, on this machine, for the time of the tests."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from source_files import ROOT

from mdc import files
from mdc.config import Params, load_params, merge
from mdc.train import launch
from mdc.train.checkpoint import step_folders
from mdc.train.work import work_folder

MakeParams = Callable[..., Params]
DAEMONS = ("munged", "slurmctld", "slurmd")
OPTIONS = {"steps": 1000, "checkpoint_every": 100, "validate_every": 500, "log_every": 50}

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
ReturnToService=2
KillWait=30
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def within(seconds: float, condition: Callable[[], object], told: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


def asked(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster of one node, found by SLURM_CONF."""
    missing = [name for name in (*DAEMONS, "sbatch", "mungekey") if not shutil.which(name)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"Slurm's daemons need root, and {missing} (apt-get install slurm-wlm munge)")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    values = {"host": socket.gethostname(), "user": getpass.getuser(), "cpus": os.cpu_count()}
    config.write_text(CONFIG.format(folder=folder, controller=free_port(), node=free_port(), **values))
    asked("mungekey", "--create", "--keyfile", str(folder / "munge.key"))
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(config)
    places = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    commands = [
        ["munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in places.items())],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-N", "localhost", "-f", str(config)],
    ]
    logs = [folder / name for name in ("slurmctld.log", "slurmd.log", "slurmctld.out", "munge.log", "munged.out")]

    def told() -> str:
        return "\n".join(log.read_text()[-1500:] for log in logs if log.exists())

    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
            if command[0] == "munged":
                within(20, (folder / "munge.socket").exists, told)
        within(60, lambda: "idle" in sinfo(), told)
        yield
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser()], capture_output=True)
        time.sleep(2)  # for the node to end its steps
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def sinfo() -> str:
    return subprocess.run(["sinfo", "--noheader", "--format", "%T"], capture_output=True, text=True).stdout


@pytest.fixture
def params(
    slurm: None, tmp_path: Path, shards: Path, small_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Params]:
    """The parameters in params.yaml of the current folder, which holds the shards and the shipped script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    shutil.copytree(shards, "data/shards")
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    compute = {"launcher": "slurm", "processes": 2, "workers": 1, "slurm": {"cpus_per_node": 2, "time": "00:10:00"}}
    made = small_params(**OPTIONS, compute=compute)
    Path("params.yaml").write_text(made.model_dump_json())
    yield made
    subprocess.run(["scancel", "--user", getpass.getuser()], capture_output=True)


@pytest.fixture
def endless(params: Params) -> Params:
    """The same for a training that a test does not outlast."""
    changed = merge(params.model_dump(), {"pretrain": {"steps": 1_000_000}})
    files.write_json(Path("params.yaml"), changed)
    return load_params("params.yaml")


def work_of(params: Params) -> Path:
    return work_folder(params, Path("data/shards"), Path("runs"))


class Stage:
    """`mdc stage pretrain` in the current folder."""

    def __init__(self) -> None:
        self.log = Path(f"stage-{time.monotonic_ns()}.log")
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "mdc.cli", "stage", "pretrain"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def job(self) -> str:
        within(60, lambda: re.search(r"job \d+ (started|is under way)", self.said()), self.said)
        found = re.search(r"job (\d+) (started|is under way)", self.said())
        assert found is not None
        return found[1]


def newest(work: Path) -> int:
    return max((int(folder.name.removeprefix("step-")) for folder in step_folders(work)), default=0)


def state(job: str) -> str:
    return asked("squeue", "--noheader", "--jobs", job, "--format", "%T")


def assert_weights_of_an_undisturbed_run(model: Path, small_params: MakeParams) -> None:
    """On as many ranks: the order of sums over more or fewer is another, which 1,000 updates make seen."""
    alone = small_params(**OPTIONS, compute={"processes": 2})
    launch.pretrain(alone, Path("data/shards"), Path("undisturbed"), Path("other-runs"))
    theirs = load_file(Path("undisturbed/model.safetensors"))
    for name, weights in load_file(model / "model.safetensors").items():
        torch.testing.assert_close(weights, theirs[name], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_preempted_and_requeued(params: Params, small_params: MakeParams) -> None:
    work, stage = work_of(params), Stage()
    job = stage.job()
    within(120, lambda: newest(work), stage.said)
    # what --signal sends before the time limit: saved, and back into the queue by the script
    asked("scancel", "--signal=TERM", job)
    within(60, lambda: state(job) == "PENDING", stage.said)
    saved = newest(work)
    assert "stopped after step" in stage.said()
    within(120, lambda: state(job) == "RUNNING" and newest(work) > saved, stage.said)
    # what an administrator or a job of higher priority does
    asked("scontrol", "requeue", job)
    assert stage.process.wait(240) == 0, stage.said()
    said = stage.said()
    assert said.count("stopped after step") == 2
    assert said.count("taken up again at step") == 2
    assert "pretrain: wrote outputs/model" in said
    assert re.search(r"pretrain: +\d+%\|", said), "the progress bar is passed on"
    assert not (work.with_name(f"job-{work.name}") / "model").exists()
    assert_weights_of_an_undisturbed_run(Path("outputs/model"), small_params)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_outlives_its_follower_and_is_found_again(endless: Params) -> None:
    work, stage = work_of(endless), Stage()
    job = stage.job()
    within(120, lambda: newest(work), stage.said)
    stage.process.kill()
    stage.process.wait()
    # told to end: the job ends within seconds, with a checkpoint
    stage = Stage()
    assert stage.job() == job
    assert "is under way" in stage.said()
    start = time.monotonic()
    stage.process.send_signal(signal.SIGTERM)
    assert stage.process.wait(60) == 143
    assert time.monotonic() - start < 30
    assert state(job) in ("", "COMPLETING")
    assert "JobState=CANCELLED" in asked("scontrol", "show", "job", job)
    log = work.with_name(f"job-{work.name}") / "log.txt"
    within(40, lambda: "stopped after step" in log.read_text(), log.read_text)
    # one that is cancelled by hand is told as such
    stage = Stage()
    second = stage.job()
    assert second != job
    asked("scancel", second)
    assert stage.process.wait(60) == 2
    assert f"job {second} ended as CANCELLED" in stage.said()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_ends_while_nobody_looks_is_delivered_by_the_next_run(params: Params) -> None:
    work, stage = work_of(params), Stage()
    job = stage.job()
    within(120, lambda: state(job) == "RUNNING", stage.said)
    stage.process.kill()
    stage.process.wait()
    result = work.with_name(f"job-{work.name}") / "model" / files.MANIFEST
    within(180, result.is_file)
    stage = Stage()
    assert stage.process.wait(60) == 0
    assert "started" not in stage.said()
    assert not files.damage(Path("outputs/model"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_flow_that_is_killed_leaves_the_job_and_one_that_is_ended_cancels_it(endless: Params) -> None:
    for name in ("mdc", ".dvc/config", "dvc.yaml", "prefect.toml", ".dvcignore"):
        source = ROOT / name
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copytree(source, name) if source.is_dir() else shutil.copy(source, name)
    asked("git", "init", "--quiet")
    whole = load_params(ROOT / "params.yaml").model_dump()  # dvc.yaml reads values that the small file leaves out
    files.write_json(Path("params.yaml"), merge(whole, endless.model_dump()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PYTHONPATH"] = str(ROOT)

    def start_flow(log: Path) -> "subprocess.Popen[bytes]":
        with log.open("wb") as out:
            command = [sys.executable, "-m", "pipelines.pretrain"]
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def job_of(log: Path, words: str) -> str:
        within(240, lambda: re.search(rf"job \d+ {words}", log.read_text()), log.read_text)
        found = re.search(rf"job (\d+) {words}", log.read_text())
        assert found is not None
        return found[1]

    work, first, second = work_of(endless), Path("first.log"), Path("second.log")
    flow = start_flow(first)
    job = job_of(first, "started")
    within(240, lambda: newest(work), first.read_text)
    below = psutil.Process(flow.pid).children(recursive=True)
    ours = [process for process in below if "uvicorn" not in " ".join(process.cmdline())]  # Prefect's own server
    assert any("stage" in process.cmdline() for process in ours)
    flow.kill()
    flow.wait()
    _, left = psutil.wait_procs(ours, timeout=30)
    assert not left
    assert state(job) == "RUNNING"
    flow = start_flow(second)
    assert job_of(second, "is under way") == job
    flow.send_signal(signal.SIGTERM)
    within(30, lambda: state(job) in ("", "COMPLETING"), second.read_text)
    flow.wait(60)
    assert "JobState=CANCELLED" in asked("scontrol", "show", "job", job)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mistake_is_told_and_not_tried_again(params: Params) -> None:
    too_short = {"caption": {"max_tokens": 3}, "evaluate": {"caption_length": 3, "metric_lengths": [3]}}
    files.write_json(Path("params.yaml"), merge(params.model_dump(), too_short))
    stage = Stage()
    assert stage.process.wait(120) == 2
    assert re.search(r"error: .*caption.max_tokens is 3; .*; job \d+ ended as FAILED", stage.said())
