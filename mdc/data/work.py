"""Unfinished work that survives a kill, as long as it is the same work."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mdc.errors import UserError
from mdc.files import read_json, write_json

IDENTITY = "identity.json"


def claim(work: Path, identity: dict[str, Any]) -> None:
    """Make the folder `work`: what it holds of the same identity stays, anything else is removed."""
    record = work / IDENTITY
    if work.exists() and not (record.is_file() and read_json(record) == identity):
        shutil.rmtree(work)
    write_json(record, identity)


@contextmanager
def full_disk_named(work: Path) -> Iterator[None]:
    """Raise UserError where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{work}: the disk is full; make room and run again, finished files are kept") from None


@contextmanager
def claimed(work: Path, identity: dict[str, Any]) -> Iterator[None]:
    """Use the folder `work`, see `claim`; at the end it goes.

    After an error it stays, for the next run. Raises UserError when the disk is full.
    """
    with full_disk_named(work):
        claim(work, identity)
        yield
    shutil.rmtree(work)


def place(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def work_beside(output: Path) -> Path:
    return output.with_name(f".{output.name}.work")
