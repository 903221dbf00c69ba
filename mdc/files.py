"""Files that appear whole or not at all, content hashes, and the manifest that marks a stage as done."""

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mdc.errors import UserError

MANIFEST = "manifest.json"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
READ_UP_TO = 10 * 2**30  # bytes; more would keep a stage waiting for minutes


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """A short hash of anything JSON can hold; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_version(*patterns: str) -> str:
    """A hash of this package's source, or of the files that match one of the patterns."""
    root = Path(__file__).parent
    paths = {path for pattern in patterns or ("**/*.py",) for path in root.glob(pattern)}
    return fingerprint({str(path.relative_to(root)): sha256(path) for path in sorted(paths)})


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed, on error removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes `path`'s place, on error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.*.tmp"):  # of a killed run; the stage lock keeps live ones out
        shutil.rmtree(stale, ignore_errors=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        replaced = path.is_dir() and not path.is_symlink() and _exchanged(temporary, path)
        if not replaced:
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two paths change places, so that there is no moment without either; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def write_json(path: Path, value: Any) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_manifest(
    folder: Path,
    inputs: Mapping[str, Any],
    counts: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **more: Any,
) -> dict[str, Any]:
    """Write `manifest.json`, the last file of a stage: what went in, what came out, a checksum of every file.

    inputs: hashes of the earlier manifests and the parameters that were used. counts: what was kept, and what was
    dropped by reason. known: bytes and sha256 of files by name, where they were taken already.
    """
    names = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    files = {
        name: dict(known[name]) if name in known else {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for name, file in names.items()
        if file.name != MANIFEST
    }
    manifest = {"inputs": dict(inputs), "counts": dict(counts), "files": files, **more}
    write_json(folder / MANIFEST, manifest)
    return manifest


def damage(folder: Path, read_up_to: float = READ_UP_TO, unread: tuple[str, ...] = ()) -> str:
    """What is wrong with a folder that has a manifest; "" if every file is as it was written.

    Sizes are compared always, contents in folders of up to `read_up_to` bytes. unread: endings of files whose contents
    are left to another.
    """
    try:
        recorded = read_json(folder / MANIFEST)["files"]
        whole = {name: entry["bytes"] for name, entry in recorded.items() if not name.endswith(unread)}
        read = whole if sum(whole.values()) <= read_up_to else {}
        for name, entry in recorded.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if name in read and sha256(folder / name) != entry["sha256"]:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error!r}"
    return ""


def read_manifest(folder: Path, made_by: str) -> dict[str, Any]:
    """The manifest of an earlier stage, or an error that says which stage to run."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{path} is not there, so stage {made_by!r} has not finished; run `mdc stage {made_by}`")
    try:
        return read_json(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove {folder} and run `mdc stage {made_by}`") from None


def read_whole(
    folder: Path, made_by: str, read_up_to: float = READ_UP_TO, unread: tuple[str, ...] = ()
) -> dict[str, Any]:
    """As `read_manifest`, of a folder whose files are as they were written (see `damage`), or an error that says so."""
    manifest = read_manifest(folder, made_by)
    if problem := damage(folder, read_up_to, unread):
        raise UserError(
            f"{folder} is damaged: {problem}; bring it back with `dvc checkout`, or run `mdc stage {made_by}`"
        )
    return manifest
