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


@contextmanager
def claimed(work: Path, identity: dict[str, Any]) -> Iterator[None]:
    """Use the folder `work`: what it holds of the same identity stays, anything else is removed; at the end it goes.

    After an error it stays, for the next run. Raises UserError when the disk is full.
    """
    record = work / IDENTITY
    if work.exists() and not (record.is_file() and read_json(record) == identity):
        shutil.rmtree(work)
    try:
        write_json(record, identity)
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{work}: the disk is full; make room and run again, finished files are kept") from None
    shutil.rmtree(work)


def place(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def work_beside(output: Path) -> Path:
    return output.with_name(f".{output.name}.work")
