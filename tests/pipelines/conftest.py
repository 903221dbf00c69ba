"""A project whose stages take a moment: real DVC and real flows, without training anything."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from source_files import ROOT

from mdc.config import STAGES

# Reads its section's value, writes one file, and can be told to fail, to hang, or to resume from a step of its own.
STAGE = """
import os, sys, time
from pathlib import Path

from mdc.processes import end_with_parent

end_with_parent()
stage = sys.argv[1]
for done in range(0, 101, 50):
    print(f"{stage}: {done:3d}%|#####| {done}/100", end="\\r", file=sys.stderr, flush=True)
    time.sleep(0.02)
print(file=sys.stderr)
work = Path("runs") / stage
work.mkdir(parents=True, exist_ok=True)
step = len(list(work.iterdir()))
(work / str(step)).touch()
print(f"{stage} began at step {step}", flush=True)
if Path(f"{stage}.hang").exists():
    Path(f"{stage}.pid").write_text(str(os.getpid()))
    time.sleep(600)
if Path(f"{stage}.fail").exists():
    print(f"error: {stage}.lr = 'x': input should be a number", file=sys.stderr)
    sys.exit(int(Path(f"{stage}.fail").read_text()))
Path("out", stage).mkdir(parents=True)
Path("out", stage, "result").write_text(stage)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: a git and DVC repository with seven quick stages named and chained like the real ones."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    for name in ("params.yaml", "prefect.toml", ".dvcignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".dvc").mkdir()
    shutil.copy(ROOT / ".dvc" / "config", tmp_path / ".dvc")
    (tmp_path / "stage.py").write_text(STAGE)
    lines = ["stages:"]
    for before, stage in zip((None, *STAGES[:-1]), STAGES, strict=True):
        lines += [
            f"  {stage}:",
            f"    cmd: exec {sys.executable} stage.py {stage}",
            f"    params: [{stage}]",
            f"    outs: [out/{stage}]",
        ]
        lines += [f"    deps: [out/{before}]"] if before else []
    (tmp_path / "dvc.yaml").write_text("\n".join(lines) + "\n")
    yield tmp_path
    for process in psutil.process_iter(["cwd"]):  # what a failed test left here
        if process.info["cwd"] == str(tmp_path) and process.pid != psutil.Process().pid:
            process.kill()
