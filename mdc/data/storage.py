"""Where the tars of shards lie: beside their index, in another folder, or at any URL that fsspec knows.

At 100 million pairs the tars are terabytes. With `shard.target` they go to a place of their own, and the folder that
DVC versions holds their names, sizes and checksums.
"""

import errno
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from mdc.errors import UserError
from mdc.files import sha256, whole_file

CHUNK = 2**23  # bytes read at once
FETCHED = "fetched"  # folder of local copies, beside the folder of shards
T = TypeVar("T")


def is_url(place: str) -> bool:
    return "://" in place


class Storage:
    """The files of one folder at a URL, or in a local folder."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._fs, self._root = self._asked(lambda: fsspec.url_to_fs(place))

    def _asked(self, action: Callable[[], T]) -> T:
        """What `action` returns. Raises UserError when the storage cannot be reached, or a package for it is missing.

        Every file system raises errors of its own.
        """
        try:
            return action()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{self.place}: {error}; run again to continue") from None
        except ImportError as error:
            raise UserError(f"{self.place}: {error}; for s3:// run `pip install 'mdc[s3]'`") from None
        except Exception as error:
            raise UserError(f"{self.place}: {type(error).__name__}: {error}; run again to continue") from None

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by its name; empty where there is no such folder."""
        fs: AbstractFileSystem = self._fs

        def listed() -> list[dict[str, Any]]:
            fs.invalidate_cache(self._root)
            return fs.ls(self._root, detail=True) if fs.exists(self._root) else []

        entries = self._asked(listed)
        return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        try:
            return int(self._fs.info(f"{self._root}/{name}")["size"])
        except FileNotFoundError:
            return None

    def put(self, source: Path) -> None:
        """Store a file under its own name; readers see all of it or none."""
        target = f"{self._root}/{source.name}"
        local = Path(target)
        if isinstance(self._fs, LocalFileSystem):
            with whole_file(local) as temporary:
                shutil.copyfile(source, temporary)
            return
        self._asked(lambda: self._fs.put_file(str(source), target))

    def sha256(self, name: str) -> str:
        """Of a file's contents, read back."""

        def read() -> str:
            digest = hashlib.sha256()
            with self._fs.open(f"{self._root}/{name}", "rb") as file:
                while block := file.read(CHUNK):
                    digest.update(block)
            return digest.hexdigest()

        return self._asked(read)

    def get(self, name: str, target: Path) -> None:
        with whole_file(target) as temporary:
            self._asked(lambda: self._fs.get_file(f"{self._root}/{name}", str(temporary)))


def records(index: Mapping[str, Any]) -> list[dict[str, Any]]:
    """file, samples, bytes and sha256 of every shard."""
    return [record for some in index["splits"].values() for record in some]


def tar_folder(folder: Path, index: Mapping[str, Any]) -> Path:
    """The local folder with the tars of the shards in `folder`, whose index is given."""
    place = index["location"]
    if is_url(place):
        return folder.parent / FETCHED / str(index["version"])
    return folder / place  # an absolute place stands for itself


def lost(folder: Path, index: Mapping[str, Any]) -> list[str]:
    """Tars that the index names and that are missing where they are stored, or have another size."""
    place = index["location"]
    sizes = Storage(place if is_url(place) else str((folder / place).absolute())).sizes()
    found = []
    for record in records(index):
        size = sizes.get(record["file"])
        if size is None:
            found.append(f"{record['file']} is missing")
        elif size != record["bytes"]:
            found.append(f"{record['file']} has {size} bytes, not {record['bytes']}")
    return found


def fetch(folder: Path, index: Mapping[str, Any], tell: Callable[[str], None]) -> Path:
    """Copy the tars that lie at a URL to where training reads them; those that are there already are left alone.

    Returns that folder. Raises UserError for a tar that is not what was written.
    """
    target = tar_folder(folder, index)
    if not is_url(index["location"]):
        return target
    storage = Storage(index["location"])
    for record in records(index):
        path = target / record["file"]
        if path.is_file() and path.stat().st_size == record["bytes"] and sha256(path) == record["sha256"]:
            continue
        tell(f"{record['file']}, {record['bytes'] / 1e6:.0f} MB")
        storage.get(record["file"], path)
        if sha256(path) != record["sha256"]:
            path.unlink()
            raise UserError(f"{storage.place}/{record['file']} is not what was written; run `mdc stage shard` again")
    return target
