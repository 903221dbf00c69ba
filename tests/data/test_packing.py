"""Captions and shards made file by file: the same for any number of workers, after a kill, and on a full disk."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdc.config import CaptionParams, ComputeParams, ShardParams
from mdc.data import packing
from mdc.data.captions import prepare_captions
from mdc.data.packing import write_shards
from mdc.data.shards import read_index, verify_shards
from mdc.errors import UserError

CAPTIONS = CaptionParams(vocab_size=100, validation_share=0.2, test_share=0.2)
SHARDS = ShardParams(samples_per_shard=8)
Files = Callable[[Path], dict[str, bytes]]


def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, downloaded: Callable[..., Path], files_of: Files
) -> None:
    source = downloaded()
    for workers in (1, 2):
        compute = ComputeParams(data_workers=workers)
        captions, shards = tmp_path / f"captions-{workers}", tmp_path / f"shards-{workers}"
        prepare_captions(CAPTIONS, source, captions, compute=compute)
        write_shards(SHARDS, source, captions, shards, compute=compute)
    assert files_of(tmp_path / "captions-1") == files_of(tmp_path / "captions-2")
    assert files_of(tmp_path / "shards-1") == files_of(tmp_path / "shards-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "captions-1",
        "captions-2",
        "downloaded",
        "shards-1",
        "shards-2",
    ]


@contextmanager
def failing_after(monkeypatch: pytest.MonkeyPatch, shards: int, error: Exception) -> Iterator[None]:
    """The disk, or what else it may be, fails when that many shards are written."""
    written = packing._write_tar
    calls = iter(range(shards))

    def write(*args: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return written(*args)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_write_tar", write)
        yield


def test_finished_shards_are_kept_when_the_disk_is_full(
    tmp_path: Path, downloaded: Callable[..., Path], files_of: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, captions, work = downloaded(), tmp_path / "captions", tmp_path / "work"
    prepare_captions(CAPTIONS, source, captions)
    write_shards(SHARDS, source, captions, tmp_path / "undisturbed")
    full = OSError(errno.ENOSPC, "No space left on device")
    with failing_after(monkeypatch, 2, full), pytest.raises(UserError, match=r"work: the disk is full; make room"):
        write_shards(SHARDS, source, captions, tmp_path / "shards", work)
    assert not (tmp_path / "shards").exists()
    kept = {path: path.stat().st_mtime_ns for path in (work / "shards").glob("*.tar")}
    assert len(kept) == 2
    damaged = min(kept)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    write_shards(SHARDS, source, captions, tmp_path / "shards", work)
    assert files_of(tmp_path / "shards") == files_of(tmp_path / "undisturbed")
    inodes = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.tar")}
    assert {path.name for path, time_ns in kept.items() if inodes[path.name] == time_ns} == {max(kept).name}
    assert not work.exists()


def test_work_on_other_data_is_not_taken_up(
    tmp_path: Path, downloaded: Callable[..., Path], files_of: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, captions, work = downloaded(), tmp_path / "captions", tmp_path / "work"
    prepare_captions(CAPTIONS, source, captions)
    with failing_after(monkeypatch, 3, RuntimeError("stop")), pytest.raises(RuntimeError, match="stop"):
        write_shards(SHARDS, source, captions, tmp_path / "shards", work)
    other = SHARDS.model_copy(update={"seed": 1})
    write_shards(other, source, captions, tmp_path / "shards", work)
    write_shards(other, source, captions, tmp_path / "fresh")
    assert files_of(tmp_path / "shards") == files_of(tmp_path / "fresh")


def test_tars_may_lie_in_another_folder(tmp_path: Path, shards: Callable[..., Path], files_of: Files) -> None:
    folder, target = shards(), tmp_path / "large disk" / "pairs"
    source, captions = tmp_path / "downloaded", tmp_path / "captions"
    away = SHARDS.model_copy(update={"target": str(target)})
    write_shards(away, source, captions, tmp_path / "away")
    assert not list((tmp_path / "away").glob("*.tar"))
    (stored,) = target.iterdir()
    assert files_of(stored) == {name: data for name, data in files_of(folder).items() if name.endswith(".tar")}
    assert read_index(tmp_path / "away")["version"] == read_index(folder)["version"]
    assert verify_shards(tmp_path / "away") == verify_shards(folder)
    from mdc.data.loader import ShardDataset

    assert ShardDataset(tmp_path / "away", "test").images([0]).equal(ShardDataset(folder, "test").images([0]))
    next(stored.glob("train*.tar")).unlink()
    with pytest.raises(UserError, match=r"train-00000\.tar is missing"):
        verify_shards(tmp_path / "away")


def test_a_relative_target_is_named_from_the_index(
    tmp_path: Path, downloaded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, captions = downloaded(), tmp_path / "captions"
    prepare_captions(CAPTIONS, source, captions)
    monkeypatch.chdir(tmp_path)
    write_shards(SHARDS.model_copy(update={"target": "far/pairs"}), source, captions, Path("data/shards"))
    assert str(read_index(Path("data/shards"))["location"]).startswith("../../far/pairs/")
    monkeypatch.chdir(tmp_path / "far")
    assert verify_shards(tmp_path / "data" / "shards")


def test_a_worker_that_is_killed_is_told(tmp_path: Path) -> None:
    from mdc.data.parallel import for_each

    with pytest.raises(UserError, match=r"a worker process was killed.*fewer compute\.data_workers than 2"):
        list(for_each(_kill_self, [(), ()], ComputeParams(data_workers=2)))


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAITING = """
import time
from mdc.config import ComputeParams
from mdc.data.parallel import for_each
print("started", flush=True)
list(for_each(time.sleep, [(0.2,)] * 600, ComputeParams(data_workers=2)))
"""


def test_workers_end_with_a_stage_that_is_killed() -> None:
    running = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert running.stdout is not None
    running.stdout.readline()
    below: list[psutil.Process] = []
    while len(below) < 3:  # two workers and Python's resource tracker
        below = psutil.Process(running.pid).children(recursive=True)
        time.sleep(0.1)
    running.kill()
    running.wait()
    _, left = psutil.wait_procs(below, timeout=60)
    assert not left


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "small", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_really_fills_up(
    tmp_path: Path, downloaded: Callable[..., Path], files_of: Files, small_disk: Path
) -> None:
    source, captions = downloaded(captions=[f"a red dog {i}" for i in range(200)]), tmp_path / "captions"
    prepare_captions(CAPTIONS, source, captions)
    write_shards(SHARDS, source, captions, tmp_path / "undisturbed")
    with pytest.raises(UserError, match=r"the disk is full; make room and run again"):
        write_shards(SHARDS, source, captions, small_disk / "shards", small_disk / "work")
    assert not (small_disk / "shards").exists()
    assert list((small_disk / "work" / "shards").glob("*.tar"))
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    write_shards(SHARDS, source, captions, small_disk / "shards", small_disk / "work")
    assert files_of(small_disk / "shards") == files_of(tmp_path / "undisturbed")


STAGES = """
import sys
from pathlib import Path
from mdc.config import CaptionParams, ComputeParams, ShardParams
from mdc.data.captions import prepare_captions
from mdc.data.packing import write_shards
folder, workers = Path(sys.argv[1]), ComputeParams(data_workers=int(sys.argv[2]))
captions = CaptionParams(vocab_size=100, validation_share=0.2, test_share=0.2)
if not (folder / "captions" / "manifest.json").is_file():
    prepare_captions(captions, folder / "downloaded", folder / "captions", folder / "work-c", workers)
write_shards(ShardParams(samples_per_shard=40), folder / "downloaded", folder / "captions", folder / "shards",
             folder / "work-s", workers)
"""


def _run(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", STAGES, str(folder), str(workers)], stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_twenty_kills_at_any_moment_change_nothing(
    tmp_path: Path, downloaded: Callable[..., Path], files_of: Files
) -> None:
    source = downloaded(captions=[f"a red dog {i % 97}" for i in range(3000)])
    start = time.monotonic()
    assert _run(tmp_path, 1).wait() == 0
    whole = time.monotonic() - start
    expected = files_of(tmp_path / "shards")
    draw = random.Random(0)
    killed = 0
    interrupted = tmp_path / "interrupted"
    interrupted.mkdir()
    (interrupted / "downloaded").symlink_to(source)
    while killed < 20:
        running = _run(interrupted, 1 + killed % 2)
        time.sleep(draw.uniform(0.3, 1.0) * whole)
        if running.poll() is None:
            running.kill()
            killed += 1
        running.wait()
        if (interrupted / "shards").exists():  # it came to its end: begin anew
            assert files_of(interrupted / "shards") == expected
            for name in ("captions", "shards"):
                subprocess.run(["rm", "-rf", interrupted / name], check=True)
    assert _run(interrupted, 1).wait() == 0
    assert files_of(interrupted / "shards") == expected
    assert sorted(path.name for path in interrupted.iterdir()) == ["captions", "downloaded", "shards"]
