"""Rows made once for every picture, kept on disk by a hash of all that they depend on.

A set of rows is a folder of the cache with an array and a manifest: made whole or not at all, and made anew where it is
damaged. Several ranks, on one host or on several that see the same folder, share the pictures: block after block, each
block to one rank. What a block holds does not depend on the number of ranks, and so neither does a byte of the rows.

Letters: B pictures of a block, N pictures, D width.
"""

import errno
import logging
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import timm
import torch
from torch import Tensor
from tqdm import tqdm

from mdc import dist
from mdc.data.work import full_disk_named
from mdc.errors import UserError
from mdc.files import MANIFEST, code_version, damage, fingerprint, whole_folder, write_manifest
from mdc.processes import only_writer

log = logging.getLogger(__name__)

ROWS = "rows.npy"
UNWRITTEN = 0xFF  # the bytes of a row until it comes; as float16 they are NaN, which no row may hold
# The source on which the numbers depend, beside torch and timm: another version of it makes rows anew.
SOURCE = (
    "api.py",
    "foreign.py",
    "model/*.py",
    "data/loader.py",
    "data/pictures.py",
    "data/transforms.py",
    "eval/features.py",
    "eval/frozen.py",
    "eval/kept.py",
    "eval/labelled.py",
)
AT_ONCE = 2**26  # bytes that are looked at together

T = TypeVar("T")
Numbers = Sequence[int] | np.ndarray


class Block(NamedTuple, Generic[T]):
    """B pictures that are looked at together. rows: where they belong among all N. keys: their names in messages."""

    rows: Numbers
    keys: Sequence[str]
    pictures: T


class Pictures(Protocol[T]):
    """N pictures in blocks. mark: a hash of what they are and in which rows."""

    mark: str

    @property
    def blocks(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, numbers: range) -> Generator[Block[T], None, None]:
        """The blocks of these numbers."""


@dataclass(frozen=True)
class RowSet(Generic[T]):
    """Rows to make. mark: what decides them beside the pictures, as JSON.

    make: pictures of a block -> float features `[B, D]` or `[B, P, D]`, stored as float16, or an array as it is stored.
    """

    name: str
    mark: Any
    make: Callable[[T], Tensor | np.ndarray]


def as_float16(features_BD: Tensor, name: str, keys: Sequence[str]) -> np.ndarray:
    """Rows for the disk; raises UserError that names the pictures whose features are not finite."""
    stored = features_BD.float().to(torch.float16).cpu().numpy()
    broken = ~np.isfinite(stored.reshape(len(stored), -1)).all(axis=1)
    if broken.any():
        names = list(compress(keys, broken))
        raise UserError(
            f"{name} of {len(names)} pictures are not finite or too large for float16: {', '.join(names[:10])}; "
            "look at these pictures, or train again if the model diverged"
        )
    return stored


def places(sets: Sequence[RowSet[T]], pictures: Pictures[T], cache: Path) -> list[Path]:
    """The folder of each set: another one as soon as anything changes that its rows depend on."""
    software = [code_version(*SOURCE), torch.__version__, timm.__version__]
    return [cache / fingerprint([software, each.mark, pictures.mark]) for each in sets]


def absent(folders: Iterable[Path]) -> list[Path]:
    """Those that are not there, or not as they were written. The others count as used now, see `make_room`."""
    return [folder for folder in dict.fromkeys(folders) if not _whole(folder)]


def _whole(folder: Path) -> bool:
    if not (folder / MANIFEST).is_file() or damage(folder):
        return False
    os.utime(folder)
    return True


@contextmanager
def reserved(folders: Iterable[Path]) -> Iterator[None]:
    """Keep other processes from making these sets meanwhile; wait for one that does."""
    with ExitStack() as locks:
        for folder in sorted(folders):
            lock, what = _lock(folder), str(folder.absolute())
            try:
                locks.enter_context(only_writer(lock, what, patience_s=1.0))
            except UserError as held:
                log.warning("%s; waiting for it", str(held).partition(";")[0])
                locks.enter_context(only_writer(lock, what, patience_s=math.inf))
        yield


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def keep(sets: Sequence[RowSet[T]], pictures: Pictures[T], cache: Path, title: str) -> list[Path]:
    """Make the sets that are not kept yet, in one pass over the pictures, and return the folders of all.

    Every rank of the group takes part. Raises UserError, the same on every rank, for rows that are not finite.
    """
    folders = places(sets, pictures, cache)
    if any(other != folders for other in dist.gather_objects(folders)):
        raise UserError("the hosts have other pictures, weights or software; give all of them the same")
    missing = dist.gather_objects(absent(folders) if dist.is_main() else [])[0]
    if missing:
        of_folder = dict(zip(folders, sets, strict=True))  # sets that are equal, as of an untrained model, lie in one
        with full_disk_named(cache):
            _make([of_folder[folder] for folder in missing], missing, pictures, title)
    dist.barrier()
    return folders


def _make(sets: Sequence[RowSet[T]], folders: Sequence[Path], pictures: Pictures[T], title: str) -> None:
    files: list[_RowFile] = []
    with ExitStack() as stack:
        own = stack.enter_context(closing(pictures.read(range(dist.rank(), pictures.blocks, dist.world_size()))))
        bar = stack.enter_context(tqdm(total=len(pictures), desc=title, unit="image", disable=not dist.is_main()))
        for _ in range(0, pictures.blocks, dist.world_size()):
            numbers, rows, count = _next(own, sets)
            if not files:
                created = []
                if dist.is_main():  # it has the first block, and so knows the width of the rows
                    temporary = [stack.enter_context(whole_folder(folder)) for folder in folders]
                    created = [_create(*each, len(pictures)) for each in zip(temporary, rows, strict=True)]
                files = [stack.enter_context(_RowFile(*each)) for each in dist.gather_objects(created)[0]]
            for file, values in zip(files, rows, strict=False):  # no rows where the blocks have run out
                file.write(numbers, values)
            bar.update(count)
        for file in files:
            file.close()
        dist.barrier()
        if dist.is_main():
            for file, each in zip(files, sets, strict=True):
                file.check()
                file.path.chmod(0o444)  # others link to it
                inputs = {"pictures": pictures.mark, "rows": each.mark}
                write_manifest(file.path.parent, inputs, {"rows": len(pictures)}, name=each.name)


def _next(own: Iterator[Block[T]], sets: Sequence[RowSet[T]]) -> tuple[Numbers, list[np.ndarray], int]:
    """Where this rank's next block belongs, its rows in each set, and the pictures in the blocks of all ranks.

    Nothing of its own where the blocks have run out. Raises UserError, the same on every rank.
    """
    numbers: Numbers = []
    rows: list[np.ndarray] = []
    problem = ""
    try:
        block = next(own, None)
        if block is not None:
            numbers, rows = block.rows, [_rows(each, block) for each in sets]
    except UserError as error:
        problem = str(error)
    told = dist.gather_objects((problem, len(numbers)))
    if problems := [problem for problem, _ in told if problem]:
        raise UserError(problems[0])
    return numbers, rows, sum(count for _, count in told)


def _rows(each: RowSet[T], block: Block[T]) -> np.ndarray:
    values = each.make(block.pictures)
    return as_float16(values, each.name, block.keys) if isinstance(values, Tensor) else values


def _create(folder: Path, values: np.ndarray, count: int) -> tuple[Path, int]:
    """Make an array for `count` rows like those of `values`; returns its file, and where in it the rows start."""
    shape = (count, *values.shape[1:])
    array = np.lib.format.open_memmap(folder / ROWS, mode="w+", dtype=values.dtype, shape=shape)
    array.view(np.uint8).fill(UNWRITTEN)
    array.flush()
    return folder / ROWS, array.offset


class _RowFile:
    """An array on disk to which several processes bring rows, in any order.

    They write and do not map it: on a network file system, hosts that map the same page undo each other's rows.
    """

    def __init__(self, path: Path, start: int) -> None:
        """start: the byte at which the rows start."""
        self.path, self._start = path, start

    def __enter__(self) -> Self:
        try:
            self._file = self.path.open("r+b", buffering=0)
        except FileNotFoundError:
            raise UserError(
                f"{self.path} is not here, but on the first host; all hosts must see the same folder (paths.cache)"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, numbers: Numbers, values: np.ndarray) -> None:
        for number, row in zip(numbers, values, strict=True):
            if os.pwrite(self._file.fileno(), row.tobytes(), self._start + int(number) * row.nbytes) < row.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Bring the rows to where other hosts see them."""
        os.fsync(self._file.fileno())
        self._file.close()

    def check(self) -> None:
        """Raise UserError unless every row has come."""
        array = np.load(self.path, mmap_mode="r")
        size = max(1, AT_ONCE // array[0].nbytes)
        for start in range(0, len(array), size):
            part = array[start : start + size].reshape(-1, array[0].size)
            lacking = ~np.isfinite(part).all(1) if part.dtype.kind == "f" else (part == UNWRITTEN).all(1)
            if lacking.any():
                raise UserError(
                    f"{self.path}: row {start + int(lacking.argmax())} and {int(lacking.sum()) - 1} more did not come; "
                    "do all hosts see the same folder (paths.cache)?"
                )


def make_room(cache: Path, limit_bytes: float, used: Collection[Path]) -> None:
    """Remove the sets that were not used for longest until the cache holds no more than `limit_bytes`.

    used: folders that stay. So do those that another process makes just now.
    """
    parts: dict[str, list[Path]] = defaultdict(list)
    for path in cache.iterdir():
        if path.is_dir():  # also what a killed process has left of one
            parts[path.name.lstrip(".").partition(".")[0]].append(path)
    sizes = {name: sum(map(_size, paths)) for name, paths in parts.items()}
    total = sum(sizes.values())
    for name in sorted(parts, key=lambda name: max(map(_used, parts[name]))):
        folder = cache / name
        if total <= limit_bytes or folder in used:
            continue
        with suppress(UserError), only_writer(_lock(folder), str(folder.absolute()), patience_s=0):
            for path in parts[name]:
                shutil.rmtree(path, ignore_errors=True)
            _lock(folder).unlink()
            total -= sizes[name]


def _size(folder: Path) -> int:
    """Bytes; 0 where another process has just renamed or removed it."""
    with suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def _used(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0
