"""Whole files and folders, and manifests."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mdc.errors import UserError
from mdc.files import (
    fingerprint,
    read_json,
    read_manifest,
    sha256,
    whole_file,
    whole_folder,
    write_json,
    write_manifest,
)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def fail_to_write(folder: Path) -> None:
    with whole_file(folder / "a.txt") as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop")


def fail_to_fill(folder: Path) -> None:
    with whole_folder(folder / "a") as temporary:
        (temporary / "part.txt").write_text("half")
        raise RuntimeError("stop")


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    with whole_file(tmp_path / "deep" / "a.txt") as temporary:
        temporary.write_text("whole")
        assert not (tmp_path / "deep" / "a.txt").exists()
    assert (tmp_path / "deep" / "a.txt").read_text() == "whole"
    assert names(tmp_path) == ["deep", "deep/a.txt"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(RuntimeError, match="stop"):
        fail_to_write(tmp_path)
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old.txt").write_text("old")
    with whole_folder(tmp_path / "a") as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "new.txt").write_text("new")
        assert names(tmp_path / "a") == ["old.txt"]
    assert names(tmp_path) == ["a", "a/sub", "a/sub/new.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged in one step on Linux alone")
def test_a_folder_that_is_replaced_is_there_at_every_moment(tmp_path: Path) -> None:
    watch = (
        "import os, sys\nwhile not os.path.exists('end'):\n    if not os.path.exists('a/file'):\n        sys.exit(3)\n"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    watcher = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\n" + watch], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert watcher.stdout is not None
    watcher.stdout.readline()
    for number in range(60):
        with whole_folder(tmp_path / "a") as folder:
            for name in ("file", *map(str, range(20))):
                (folder / name).write_text(str(number))
    (tmp_path / "end").touch()
    assert watcher.wait() == 0
    assert (tmp_path / "a" / "file").read_text() == "59"
    assert names(tmp_path) == sorted(["a", "end", "a/file", *(f"a/{name}" for name in range(20))])


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old.txt").write_text("old")
    with pytest.raises(RuntimeError, match="stop"):
        fail_to_fill(tmp_path)
    assert names(tmp_path) == ["a", "a/old.txt"]


def test_what_a_killed_run_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, signal; from pathlib import Path; from mdc.files import whole_folder\n"
        "with whole_folder(Path('a')) as folder:\n"
        "    (folder / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    left = names(tmp_path)
    assert len(left) == 2  # the temporary folder and its file
    assert "a" not in left
    with whole_folder(tmp_path / "a") as folder:
        (folder / "whole").write_text("whole")
    assert names(tmp_path) == ["a", "a/whole"]


def test_a_checksum_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 300_000)
    assert sha256(tmp_path / "a") == hashlib.sha256(b"x" * 300_000).hexdigest()


def test_a_fingerprint_ignores_the_order_of_keys_and_nothing_else() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1, "b": [1, 2]}) != fingerprint({"a": 1, "b": [2, 1]})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_json_is_the_same_for_the_same_value(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": "é", "a": 1.5})
    write_json(tmp_path / "b.json", {"a": 1.5, "b": "é"})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert read_json(tmp_path / "a.json") == {"a": 1.5, "b": "é"}


def test_a_manifest_names_every_other_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("aa")
    write_manifest(tmp_path, inputs={"shards": "f00"}, counts={"kept": 2}, fingerprint="abc")
    manifest = read_manifest(tmp_path, made_by="shard")
    assert list(manifest["files"]) == ["a.txt", "sub/b.txt"]
    assert manifest["files"]["a.txt"] == {"bytes": 2, "sha256": sha256(tmp_path / "a.txt")}
    assert (manifest["inputs"], manifest["counts"], manifest["fingerprint"]) == ({"shards": "f00"}, {"kept": 2}, "abc")
    first = (tmp_path / "manifest.json").read_bytes()
    write_manifest(tmp_path, inputs={"shards": "f00"}, counts={"kept": 2}, fingerprint="abc")
    assert (tmp_path / "manifest.json").read_bytes() == first


def test_no_manifest_says_which_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `mdc stage shard`"):
        read_manifest(tmp_path, made_by="shard")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the write fails in the middle."""
    script = (
        "import resource, signal; from pathlib import Path; from mdc.files import whole_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with whole_file(Path('a')) as temporary:\n"
        "    temporary.write_bytes(b'x' * 5000)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "OSError" in done.stderr
    assert os.listdir(tmp_path) == []
