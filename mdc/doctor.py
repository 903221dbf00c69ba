"""What `mdc doctor` looks at, and the one check that must come before Prefect is imported."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from mdc.config import STAGES, Params
from mdc.errors import UserError
from mdc.files import MANIFEST, read_manifest, sha256

PACKAGES = ("torch", "timm", "transformers", "tokenizers", "img2dataset", "webdataset", "faiss-cpu", "mlflow", "dvc")
PORTS = {"PREFECT_PORT": 4200, "MLFLOW_PORT": 5000}
DISK_GB = 5.0  # free space that the sample's whole pipeline takes with room to spare
LISTED = 5  # missing files named in one line


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer."""

    good: bool
    what: str

    def __str__(self) -> str:
        return f"{'ok     ' if self.good else 'PROBLEM'}  {self.what}"


def backport() -> Path | None:
    """The Python 3.6 backport of `dataclasses`, which img2dataset's packaging brings along, if it is installed."""
    path = Path(sysconfig.get_paths()["purelib"]) / "dataclasses.py"
    return path if path.is_file() else None


def check_backport() -> None:
    """Raise UserError if the backport is there: Prefect's own server puts site-packages first and then cannot start."""
    if path := backport():
        raise UserError(
            f"{path} hides Python's own dataclasses module and keeps Prefect's server from starting; "
            f"remove it with `{Path(sys.executable)} -m pip uninstall -y dataclasses` (img2dataset works without it)"
        )


def examine(params: Params) -> list[Finding]:
    """Check the installation, then the outputs of every stage."""
    return [*_installation(), *_ports(), _disk(), *_outputs(params), *_storage(params), *_versions()]


def _installation() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    findings = [Finding(sys.version_info[:2] == (3, 11), f"Python {version} (3.11 is needed)")]
    for name in (*PACKAGES, "prefect"):
        try:
            findings.append(Finding(True, f"{name} {importlib.metadata.version(name)}"))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(False, f"{name} is not installed; run `make setup`"))
    try:
        check_backport()
    except UserError as error:
        findings.append(Finding(False, str(error)))
    return findings


def _ports() -> list[Finding]:
    findings = []
    for variable, default in PORTS.items():
        port = int(os.environ.get(variable, default))
        with socket.socket() as probe:
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        note = f"in use, by `make services` or another program; {variable} chooses another" if taken else "free"
        findings.append(Finding(True, f"port {port} is {note}"))
    return findings


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 1e9
    return Finding(free >= DISK_GB, f"{free:.0f} GB free on this disk ({DISK_GB:.0f} GB are needed for the sample)")


def _outputs(params: Params) -> list[Finding]:
    from mdc.stages import STAGES as stages
    from mdc.stages import Folders

    at = Folders.of(params.paths)
    return [_output(name, stages[name].output(at)) for name in STAGES]


def _output(stage: str, folder: Path) -> Finding:
    """Compare a stage's folder with its manifest."""
    if not folder.exists():
        return Finding(True, f"{stage}: not made yet")
    if not (folder / MANIFEST).is_file():
        return Finding(False, f"{stage}: {folder} has no {MANIFEST}; run `mdc stage {stage}`")
    try:
        files = read_manifest(folder, made_by=stage)["files"]
    except UserError as error:
        return Finding(False, f"{stage}: {error}")
    lost = [name for name in files if not (folder / name).is_file()]
    changed = [name for name, is_ in files.items() if name not in lost and sha256(folder / name) != is_["sha256"]]
    if lost or changed:
        bad = ", ".join([f"{name} is missing" for name in lost] + [f"{name} has changed" for name in changed])
        return Finding(False, f"{stage}: {folder}: {bad}; run `dvc checkout {folder}`, or `dvc repro -f {stage}`")
    return Finding(True, f"{stage}: {folder}, {len(files)} files as in the manifest")


def _storage(params: Params) -> list[Finding]:
    """Compare the shards that the index names with what lies where they are stored."""
    from mdc.data.shards import INDEX, read_index
    from mdc.data.storage import lost, records
    from mdc.stages import Folders

    folder = Folders.of(params.paths).shards
    if not (folder / INDEX).is_file():
        return []
    try:
        index = read_index(folder)
        place, missing = index["location"] or str(folder), lost(folder, index)
    except UserError as error:
        return [Finding(False, str(error))]
    if missing:
        shown = ", ".join(missing[:LISTED]) + (f" and {len(missing) - LISTED} more" if len(missing) > LISTED else "")
        return [Finding(False, f"shards at {place}: {shown}; bring them back, or run `dvc repro -f shard`")]
    return [Finding(True, f"shards at {place}: all {len(records(index))} are there, in their sizes")]


def _versions() -> list[Finding]:
    """Ask DVC whether its cache, and its remote if there is one, hold what dvc.lock names."""
    if not Path("dvc.lock").is_file() or shutil.which("dvc") is None:
        return []
    remotes = subprocess.run(["dvc", "remote", "list"], capture_output=True, text=True).stdout.strip()
    asked = ["--not-in-remote"] if remotes else []
    done = subprocess.run(["dvc", "data", "status", "--json", *asked], capture_output=True, text=True)
    if done.returncode:
        return [Finding(False, f"`dvc data status` failed: {done.stderr.strip().splitlines()[-1:]}")]
    status = json.loads(done.stdout)
    findings = []
    for key, what, mend in (
        ("not_in_cache", "DVC's cache lacks", "run `dvc pull`, or `dvc repro`"),
        ("not_in_remote", "DVC's remote lacks", "run `dvc push`"),
    ):
        if missing := status.get(key):
            findings.append(Finding(False, f"{what} {', '.join(sorted(missing)[:LISTED])}; {mend}"))
    return findings or [Finding(True, f"DVC's cache{' and remote hold' if remotes else ' holds'} what dvc.lock names")]
