"""Running a stage: one writer, whole outputs, an orderly end, and work that belongs to its data and parameters."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mdc import stages
from mdc.config import STAGES, Params, load_params
from mdc.errors import UserError
from mdc.files import whole_folder, write_manifest
from mdc.stages import Folders, Stage, run_stage

Write = Callable[[Params, Folders], None]


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(tmp_path)
    return Params()


def make(params: Params, at: Folders) -> None:
    with whole_folder(at.shards) as folder:
        (folder / "a.txt").write_text("whole")
        write_manifest(folder, inputs={}, counts={})


def replace_shard(monkeypatch: pytest.MonkeyPatch, run: Write) -> None:
    monkeypatch.setitem(stages.STAGES, "shard", Stage(run, stages.STAGES["shard"].output))


def test_the_stages_are_those_of_the_parameters() -> None:
    assert tuple(stages.STAGES) == STAGES
    assert set(STAGES) < set(Params.model_fields)


def test_folders_follow_the_paths() -> None:
    params = Params.model_validate({"paths": {"data": "d", "outputs": "o", "runs": "r"}})
    at = Folders.of(params.paths)
    assert (at.shards, at.model, at.runs) == (Path("d/shards"), Path("o/model"), Path("r"))
    assert len({stage.output(at) for stage in stages.STAGES.values()}) == len(STAGES)


def test_unfinished_work_belongs_to_what_it_depends_on() -> None:
    at = Folders.of(Params().paths)
    first = at.work("download", {"params": {"timeout": 1.0}, "list": "abc"})
    assert first == at.work("download", {"list": "abc", "params": {"timeout": 1.0}})
    assert first.parent == at.runs
    others = [{"params": {"timeout": 2.0}, "list": "abc"}, {"params": {"timeout": 1.0}, "list": "abd"}]
    assert len({first, *(at.work("download", other) for other in others)}) == 3


@pytest.mark.usefixtures("params")
@pytest.mark.parametrize("place", ["data", "runs"])
def test_a_place_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setitem(stages.STAGES, "shard", Stage(make, stages.STAGES["shard"].output))
    Path("file").touch()
    with pytest.raises(UserError, match=r"file/.* cannot be made \(Not a directory\); set paths.data"):
        run_stage("shard", Params.model_validate({"paths": {place: "file/x"}}))


def test_files_that_no_stage_made_are_not_replaced(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_shard(monkeypatch, make)
    Path("data/shards").mkdir(parents=True)
    Path("data/shards/thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"data/shards holds files that no stage made, such as thesis.tex"):
        run_stage("shard", params)
    assert Path("data/shards/thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("content", ["Whole", "who", None])
def test_damaged_input_is_named(params: Params, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    replace_shard(monkeypatch, make)
    run_stage("shard", params)
    if content is None:
        Path("data/shards/a.txt").unlink()
    else:
        Path("data/shards/a.txt").write_text(content)
    with pytest.raises(UserError, match=r"data/shards is damaged: a.txt .*run `mdc stage shard`"):
        run_stage("pretrain", params)


def test_an_unreadable_manifest_is_named(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_shard(monkeypatch, make)
    run_stage("shard", params)
    Path("data/shards/manifest.json").write_text("{broken")
    with pytest.raises(UserError, match=r"data/shards/manifest.json is damaged"):
        run_stage("pretrain", params)


def test_a_stage_returns_the_folder_it_made(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_shard(monkeypatch, make)
    assert run_stage("shard", params) == Path("data/shards")
    assert sorted(os.listdir("data")) == ["shards"]


def test_a_stage_that_leaves_no_manifest_is_a_bug(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_shard(monkeypatch, lambda params, at: at.shards.mkdir(parents=True))
    with pytest.raises(AssertionError, match=r"without data/shards/manifest\.json"):
        run_stage("shard", params)


def test_an_unknown_stage_lists_the_known(params: Params) -> None:
    with pytest.raises(UserError, match=r"unknown stage 'shards' \(did you mean 'shard'\?\); one of: .*pretrain"):
        run_stage("shards", params)


@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        ("caption", "download"),
        ("shard", "download"),
        ("pretrain", "shard"),
        ("extract", "shard"),
        ("evaluate", "shard"),
        ("report", "download"),
    ],
)
def test_a_stage_before_its_time_says_what_to_run(params: Params, stage: str, needed: str) -> None:
    with pytest.raises(UserError, match=f"run `mdc stage {needed}`"):
        run_stage(stage, params)
    assert not Path("data").exists()
    assert not Path("outputs").exists()


def test_a_second_writer_is_refused(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LOCK_PATIENCE_S", 0.0)

    def run_again(params: Params, at: Folders) -> None:
        run_stage("shard", params)

    replace_shard(monkeypatch, run_again)
    with pytest.raises(UserError, match=f"data/shards is being written by process {os.getpid()}"):
        run_stage("shard", params)


INTERRUPTED = """
import subprocess, sys, time
from pathlib import Path
from mdc import stages
from mdc.config import Params
from mdc.files import whole_folder

def run(params, at):
    with whole_folder(at.shards) as folder:
        (folder / "half.txt").write_text("half")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("child").write_text(str(child.pid))
        time.sleep(600)

stages.STAGES["shard"] = stages.Stage(run, stages.STAGES["shard"].output)
stages.run_stage("shard", Params())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_being_told_to_end_leaves_neither_half_an_output_nor_a_child(tmp_path: Path, number: signal.Signals) -> None:
    running = subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not ((tmp_path / "child").is_file() and (tmp_path / "child").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = int((tmp_path / "child").read_text())
    running.send_signal(number)
    assert running.wait(20) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not (tmp_path / "data").exists()


def test_a_killed_stage_is_made_whole_by_running_it_again(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = INTERRUPTED.replace("time.sleep(600)\n\nstages", "import os; os.kill(os.getpid(), 9)\n\nstages")
    done = subprocess.run([sys.executable, "-c", killed.replace('time.sleep(600)"', 'pass"')])
    assert done.returncode == -signal.SIGKILL
    assert [name for name in os.listdir("data") if not name.startswith(".")] == []
    replace_shard(monkeypatch, make)
    run_stage("shard", params)
    assert os.listdir("data") == ["shards"]


def test_the_shipped_parameters_name_the_sample() -> None:
    params = load_params(Path(__file__).parent.parent / "params.yaml")
    assert Path(params.download.input).parts[0] == params.paths.data
