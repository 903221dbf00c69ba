"""Tar files whose bytes depend on nothing but names and contents, with the offset of every member."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_NAME_BYTES = 100  # of the plain header


class Member(NamedTuple):
    name: str
    offset: int  # of the contents, bytes from the start of the file
    size: int  # of the contents, bytes


class FixedTar:
    """Writes members with time 0, owner 0 and mode 644."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0

    def add(self, name: str, data: bytes) -> Member:
        """Append one file and say where its contents lie."""
        assert len(name.encode()) <= MAX_NAME_BYTES, f"{name!r} is too long for a tar header"
        info = tarfile.TarInfo(name)
        info.size = len(data)
        header = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
        member = Member(name, self._position + len(header), len(data))
        padding = -len(data) % tarfile.BLOCKSIZE
        for part in (header, data, bytes(padding)):
            self._file.write(part)
        self._position = member.offset + len(data) + padding
        return member

    def close(self) -> None:
        """Write the end mark; the file itself stays open."""
        end = self._position + 2 * tarfile.BLOCKSIZE
        self._file.write(bytes(end - self._position + -end % tarfile.RECORDSIZE))


def members(path: Path) -> Iterator[Member]:
    """Every file in a tar, in its order. Raises tarfile.ReadError where the tar ends within a member."""
    with tarfile.open(path, "r:") as tar:
        for info in tar:
            yield Member(info.name, info.offset_data, info.size)


def read_at(file: io.BufferedReader, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
