"""The command line: clear errors with an exit code, and what each command says."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from source_files import ROOT

from mdc import cli, doctor
from mdc.config import Params
from mdc.errors import UserError
from mdc.files import whole_folder, write_manifest
from mdc.stages import STAGES, Folders

MDC = Path(sys.executable).parent / "mdc"


def mdc(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MDC), *arguments], cwd=cwd, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one message of a command that was given something wrong."""
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def set_param(project: Path, pattern: str, replacement: str) -> None:
    text = (project / "params.yaml").read_text(encoding="utf-8")
    assert re.search(pattern, text)
    (project / "params.yaml").write_text(re.sub(pattern, replacement, text, count=1), encoding="utf-8")


def test_help_names_the_commands(tmp_path: Path) -> None:
    done = mdc("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(
        f" {command} " in done.stdout for command in ("stage", "sample", "results", "doctor", "caption", "score")
    )


def test_an_unknown_stage(project: Path) -> None:
    assert "unknown stage 'shards' (did you mean 'shard'?)" in refused(mdc("stage", "shards", cwd=project))


def test_no_parameter_file(tmp_path: Path) -> None:
    assert "params.yaml does not exist" in refused(mdc("stage", "shard", cwd=tmp_path))


def test_a_misspelt_parameter_stops_every_stage_before_it_starts(project: Path) -> None:
    set_param(project, r"  t_min: ", "  t_mim: ")
    message = refused(mdc("stage", "download", cwd=project))
    assert "params.yaml: unknown parameter pretrain.t_mim (did you mean 't_min'?)" in message
    assert os.listdir(project) == ["params.yaml"]


def test_a_text_where_a_number_belongs(project: Path) -> None:
    set_param(project, r"  steps: ", '  steps: "100"')
    assert "params.yaml: pretrain.steps = '100': input should be a valid integer" in refused(
        mdc("stage", "pretrain", cwd=project)
    )


def test_another_parameter_file(project: Path) -> None:
    (project / "params.yaml").rename(project / "mine.yaml")
    assert "urls.parquet" in refused(mdc("stage", "download", "--params", "mine.yaml", cwd=project))


def test_a_list_that_is_not_there(project: Path) -> None:
    assert "data/sample/urls.parquet" in refused(mdc("stage", "download", cwd=project))
    assert not (project / "data").exists()


def test_a_place_that_cannot_be_written_is_a_mistake(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> None:
        (project / "params.yaml" / "x").write_text("")

    monkeypatch.setattr("mdc.cli.app", write)
    with pytest.raises(SystemExit, match="2"):
        cli.main()


def test_a_worker_without_a_meeting_place_trains_nothing(project: Path) -> None:
    assert "set compute.launcher: hosts" in refused(mdc("worker", cwd=project))
    assert os.listdir(project) == ["params.yaml"]


def test_no_results_yet(project: Path) -> None:
    assert "run `mdc stage evaluate`" in refused(mdc("results", cwd=project))


def test_a_sweep_with_a_mistake(project: Path) -> None:
    assert "wrong.yaml does not exist" in refused(mdc("sweep", "wrong.yaml", cwd=project))
    (project / "wrong.yaml").write_text("seed: [0]\n")
    assert "unknown parameter seed (did you mean 'seeds'?)" in refused(mdc("sweep", "wrong.yaml", cwd=project))


WHILE_LOADING = """
import builtins, os, signal, sys

load, module, last = builtins.__import__, sys.argv.pop(1), sys.argv.pop(1)

def interrupted(name, *rest):
    if name == last:
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *rest)

builtins.__import__ = interrupted
load(module, fromlist=["main"]).main()
"""


@pytest.mark.parametrize(
    ("module", "loads", "code"),
    [("mdc.start", "typer", 130), ("mdc.start", "ruamel.yaml", 130), ("mdc.train.__main__", "torch", -signal.SIGINT)],
)
def test_ctrl_c_while_libraries_are_loaded_says_nothing(project: Path, module: str, loads: str, code: int) -> None:
    words = ["doctor"] if module == "mdc.start" else ["--params=p", "--shards=s", "--output=o", "--work=w"]
    command = [sys.executable, "-c", WHILE_LOADING, module, loads, *words]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


SLOW_STAGE = """
import sys, time
from pathlib import Path
from mdc import cli, stages

def run(params, at):
    Path("started").touch()
    time.sleep(600)

stages.STAGES["shard"] = stages.Stage(run, stages.STAGES["shard"].output)
sys.argv = ["mdc", "stage", "shard"]
cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_being_told_to_end(project: Path, number: signal.Signals, code: int) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", SLOW_STAGE], cwd=project, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    deadline = time.monotonic() + 30
    while not (project / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    _, said = running.communicate(timeout=20)
    assert running.returncode == code
    assert said == "error: stage shard was told to end; run the same command to continue\n"


class TestDoctor:
    @pytest.fixture
    def shards(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A stage's folder with two files, in an otherwise empty project."""
        monkeypatch.chdir(tmp_path)
        folder = STAGES["shard"].output(Folders.of(Params().paths))
        with whole_folder(folder) as temporary:
            (temporary / "a.tar").write_text("a")
            (temporary / "b.tar").write_text("b")
            write_manifest(temporary, inputs={}, counts={})
        return folder

    def test_finds_this_installation_sound(self, project: Path) -> None:
        done = mdc("doctor", cwd=project)
        assert done.returncode == 0, done.stdout
        assert "PROBLEM" not in done.stdout
        assert "prefect 3" in done.stdout

    def test_finds_outputs_whole(self, shards: Path) -> None:
        assert "2 files as in the manifest" in str(doctor._output("shard", shards))

    @pytest.mark.parametrize("harm", ["a.tar is missing", "b.tar has changed", "has no manifest.json", "is damaged"])
    def test_finds_what_is_lost_or_changed(self, shards: Path, harm: str) -> None:
        if "missing" in harm:
            (shards / "a.tar").unlink()
        elif "changed" in harm:
            (shards / "b.tar").write_text("x")
        elif "damaged" in harm:
            (shards / "manifest.json").write_text("{")
        else:
            (shards / "manifest.json").unlink()
        findings = [finding for finding in doctor.examine(Params()) if not finding.good]
        assert len(findings) == 1
        assert harm in str(findings[0])

    def test_sees_a_port_in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            monkeypatch.setenv("MLFLOW_PORT", str(server.getsockname()[1]))
            (finding,) = [finding for finding in doctor._ports() if "MLFLOW_PORT" in finding.what]
        assert "in use" in finding.what


class TestBackport:
    """img2dataset's packaging brings a module that keeps Prefect's own server from starting."""

    def test_is_not_installed_here(self) -> None:
        assert doctor.backport() is None

    def test_is_named_with_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "dataclasses.py").touch()
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
        with pytest.raises(UserError, match=r"dataclasses\.py hides .* -m pip uninstall -y dataclasses"):
            doctor.check_backport()
