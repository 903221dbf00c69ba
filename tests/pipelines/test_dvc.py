"""One stage through DVC: what is run, what is passed on, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from mdc.config import STAGES, change_params
from pipelines._dvc import USER_ERROR, StageFailed, reproduce, split_output


def repro(stage: str) -> list[str]:
    """Run a stage and return its lines."""
    lines: list[str] = []
    reproduce(stage, lines.append, lambda text: None)
    return lines


def dvc(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def ran(output: str | list[str]) -> list[str]:
    return re.findall(r"(\w+) began at", output if isinstance(output, str) else "\n".join(output))


def wait_for(path: Path) -> int:
    """The number in a file, as soon as it is there."""
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(path.read_text())


def is_gone_within(pid: int, seconds: float) -> bool:
    """Whether a process ends and init takes note of it; until then DVC counts it as alive."""
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


def test_text_is_told_from_progress() -> None:
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write("\r  0%|\r 50%|ü\r100%|\nall done\n\nno line end".encode())
    with open(reader, "rb") as file:
        assert list(split_output(file)) == [
            ("  0%|", True),
            (" 50%|ü", True),
            ("100%|", False),
            ("all done", False),
            ("no line end", False),
        ]


def test_text_comes_as_soon_as_it_is_written() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as incoming, open(writer, "wb", buffering=0) as outgoing:
        parts = split_output(incoming)
        outgoing.write(b"one\ntw")
        assert next(parts) == ("one", False)
        threading.Timer(0.2, outgoing.write, [b"o\n"]).start()
        assert next(parts) == ("two", False)


def test_front_doors_share_what_is_done(project: Path) -> None:
    """Stage by stage as the flow does, then all at once as a person does, with a change in between."""
    assert [ran(repro(stage)) for stage in STAGES[:2]] == [[stage] for stage in STAGES[:2]]
    assert ran(dvc("repro", "pretrain")) == ["shard", "pretrain"]
    assert "up to date" in dvc("status", "pretrain", "--with-deps")
    change_params("params.yaml", {"shard": {"seed": 4}})
    assert ran(dvc("repro", "pretrain")) == ["shard"]  # its output is as before, so nothing behind it is out of date
    assert ran(repro("shard")) == ran(repro("pretrain")) == []
    change_params("params.yaml", {"compute": {"workers": 0}, "tracking": {"experiment": "other"}})
    assert "up to date" in dvc("status", "pretrain", "--with-deps")


def test_output_is_passed_on_without_dvcs_hints(project: Path) -> None:
    lines: list[str] = []
    bars: list[str] = []
    reproduce("download", lines.append, bars.append)
    assert "download began at step 0" in lines
    assert [bar.split("|")[0] for bar in bars] == ["download:   0%", "download:  50%", "download: 100%"]
    assert not [line for line in lines if "git" in line or "dvc push" in line]


@pytest.mark.parametrize("code", [1, 2])
def test_a_failure_says_why(project: Path, code: int) -> None:
    Path("download.fail").write_text(str(code))
    with pytest.raises(StageFailed) as caught:
        repro("download")
    assert str(caught.value) == "stage 'download': error: download.lr = 'x': input should be a number"
    assert caught.value.code == code
    assert not Path("out", "download").exists()
    Path("download.fail").unlink()
    assert "download began at step 1" in repro("download")


def test_what_a_stage_lacks_is_named_with_what_makes_it(project: Path) -> None:
    with pytest.raises(StageFailed) as caught:
        repro("shard")
    lacks = project / "out" / "caption"
    assert str(caught.value) == f"stage 'shard' reads {lacks}, which is not there; run the stages before it"
    assert caught.value.code == USER_ERROR, "which is not tried again"
    words = "ERROR: failed to reproduce 'download': [Errno 2] No such file or directory: '/p/data/sample/urls.parquet'"
    assert "reads /p/data/sample/urls.parquet, which is not there; run `mdc sample`, or" in str(
        StageFailed("download", 255, [words])
    )


def test_a_stage_that_does_not_exist(project: Path) -> None:
    with pytest.raises(StageFailed, match="stage 'downlod'"):
        repro("downlod")


class Cancelled(BaseException):
    """Stands for what Prefect raises in the flow when a run is cancelled."""


def test_an_exception_in_the_caller_ends_the_stage(project: Path) -> None:
    Path("download.hang").touch()

    def cancel(line: str) -> None:
        if "began" in line:
            wait_for(project / "download.pid")
            raise Cancelled

    with pytest.raises(Cancelled):
        reproduce("download", cancel, lambda text: None)
    assert is_gone_within(wait_for(project / "download.pid"), 15)
    Path("download.hang").unlink()
    assert "download began at step 1" in repro("download")


CALLER = """
import sys
from pipelines._dvc import reproduce
reproduce(sys.argv[1], print, print)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_caller_is_the_end_of_the_stage(project: Path, number: signal.Signals) -> None:
    """Killed or interrupted, and run again at once: nothing is left behind, and nothing must be cleaned by hand."""
    Path("download.hang").touch()
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, "download"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stage = wait_for(project / "download.pid")
    dvc_process = psutil.Process(stage).parent()
    caller.send_signal(number)
    caller.wait(timeout=40)
    assert dvc_process is not None
    assert is_gone_within(dvc_process.pid, 15)
    assert is_gone_within(stage, 15)
    Path("download.hang").unlink()
    assert "download began at step 1" in repro("download")


def test_work_outside_the_outputs_survives_a_killed_run(project: Path) -> None:
    """DVC removes outputs before a stage runs, so what a stage resumes from lies elsewhere. The stage ends with DVC."""
    repro("download")
    Path("download.hang").touch()
    change_params("params.yaml", {"download": {"retries": 2}})
    running = subprocess.Popen([sys.executable, "-m", "dvc", "repro", "download"], stdout=subprocess.DEVNULL)
    stage = wait_for(project / "download.pid")
    assert not Path("out", "download").exists()
    running.kill()
    running.wait()
    assert is_gone_within(stage, 15)
    Path("download.hang").unlink()
    assert "download began at step 2" in repro("download")


def test_a_bar_that_is_not_text_does_no_harm() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\xff\xfe 10%|\r")
    os.close(writer)
    with open(reader, "rb") as file:
        assert [is_progress for _, is_progress in split_output(file)] == [True]
