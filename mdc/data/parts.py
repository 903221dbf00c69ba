"""Parts of a download: each a tar of pictures and a parquet file of all rows, failures included."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mdc.data.fetch import is_retryable
from mdc.data.images import StoredImage
from mdc.data.tars import FixedTar, members, read_at
from mdc.files import sha256, whole_file

DIGITS = 5  # of a part's name
TAR, ROWS = ".tar", ".parquet"
EARLIER = ".earlier"  # the rows of a part that was reopened
TAR_SHA256 = b"tar_sha256"  # in the parquet file's own metadata
# A sample's captions by the column that each came from; `caption` is the first.
CAPTIONS = pa.list_(pa.struct([("source", pa.string()), ("text", pa.string())]))
PART_SCHEMA = pa.schema(
    [("uid", pa.string()), ("url", pa.string()), ("caption", pa.string()), ("captions", CAPTIONS)]
    + [(name, pa.string()) for name in ("label", "group", "status", "detail")]
    + [(name, pa.int32()) for name in ("width", "height", "original_width", "original_height")]
    + [(name, pa.string()) for name in ("mode", "sha256")]
)


def part_path(folder: Path, part: int, suffix: str) -> Path:
    """`folder/00007.tar` for part 7 and suffix ".tar"."""
    return folder / f"{part:0{DIGITS}d}{suffix}"


def part_rows(folder: Path, part: int) -> pa.Table:
    """The rows of a part, sorted by uid."""
    return pq.read_table(part_path(folder, part, ROWS))


def is_done(folder: Path, part: int, uids: list[str], rows_suffix: str = ROWS) -> bool:
    """Whether the part is there, has these rows in any order, and its tar is the one that was written."""
    tar, table = part_path(folder, part, TAR), part_path(folder, part, rows_suffix)
    if not (tar.is_file() and table.is_file()):
        return False
    try:
        rows = pq.read_table(table, columns=["uid"])
    except pa.ArrowInvalid:
        return False
    checksum = (rows.schema.metadata or {}).get(TAR_SHA256, b"").decode()
    return rows["uid"].to_pylist() == sorted(uids) and checksum == sha256(tar)


def reopen(folder: Path, part: int) -> None:
    """Have the failures of a finished part that may pass asked for again; what else it holds stays."""
    part_path(folder, part, ROWS).replace(part_path(folder, part, EARLIER))


def is_final(status: str) -> bool:
    """Whether asking again is of no use."""
    return not is_retryable(status.removeprefix("failed:"))


def final_rows(folder: Path, part: int) -> list[dict[str, Any]]:
    """The rows of a reopened part that are not asked for again; none where there is no such part."""
    path = part_path(folder, part, EARLIER)
    rows = pq.read_table(path).to_pylist() if path.is_file() else []
    return [row for row in rows if is_final(row["status"])]


class PartWriter:
    """img2dataset's hook for output: a tar and a parquet file whose bytes do not depend on which thread was first.

    Pictures wait in an unnamed file until all are there. The parquet file comes last, so a part that has one is whole.
    A part that was reopened keeps its final rows and their pictures.
    """

    def __init__(
        self, shard_id: int, output_folder: str, _save_caption: bool, _digits: int, _schema: Any, encode_format: str
    ) -> None:
        self._folder, self._part = Path(output_folder), shard_id
        self._extension = encode_format
        self._pictures = tempfile.TemporaryFile(dir=output_folder)  # noqa: SIM115
        self._progress = self._path(".progress").open("wb", buffering=0)
        self._rows = final_rows(self._folder, shard_id)
        self._spans: dict[str, tuple[int, int]] = {}
        self._error: OSError | None = None
        if self._rows:
            self._keep_pictures()

    def _path(self, suffix: str) -> Path:
        return part_path(self._folder, self._part, suffix)

    def _keep(self, uid: str, data: bytes) -> None:
        self._spans[uid] = (self._pictures.tell(), len(data))
        self._pictures.write(data)

    def _keep_pictures(self) -> None:
        with self._path(TAR).open("rb") as tar:
            for member in members(self._path(TAR)):
                self._keep(member.name.partition(".")[0], read_at(tar, member.offset, member.size))

    def write(self, image: StoredImage | None, _key: str, _caption: str | None, meta: dict[str, Any]) -> None:
        """One row of the list, with its picture if it has one."""
        row: dict[str, Any] = {name: meta.get(name) for name in PART_SCHEMA.names}
        reason, _, detail = (meta["error_message"] or "").partition(": ")
        row["status"], row["detail"] = (f"failed:{reason}", detail) if reason else ("ok", None)
        try:
            if image is not None:
                row["mode"] = image.mode
                self._keep(row["uid"], image.data)
            self._progress.write(b".")
        except OSError as error:  # img2dataset would print it and go on; close() raises it
            self._error = error
        self._rows.append(row)

    def close(self) -> None:
        """Write the part. Raises OSError, as when the disk is full; then the part is not there."""
        self._progress.close()
        if self._error:
            raise self._error
        self._rows.sort(key=lambda row: row["uid"])
        with whole_file(self._path(TAR)) as path:
            with path.open("wb") as file:
                tar = FixedTar(file)
                for row in self._rows:
                    uid = row["uid"]
                    if uid in self._spans:
                        start, size = self._spans[uid]
                        self._pictures.seek(start)
                        tar.add(f"{uid}.{self._extension}", self._pictures.read(size))
                tar.close()
            checksum = sha256(path)
        self._pictures.close()
        table = pa.Table.from_pylist(self._rows, PART_SCHEMA.with_metadata({TAR_SHA256: checksum}))
        with whole_file(self._path(ROWS)) as path:
            pq.write_table(table, path)
        self._path(EARLIER).unlink(missing_ok=True)
