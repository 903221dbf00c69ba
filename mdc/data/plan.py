"""What is to be fetched: every record of the input once, sorted by a hash of its URL, in parts of a fixed size.

Rows that name one URL become one sample with all their captions. The order depends on the contents alone, however the
records are spread over files, and spreads the URLs of each host over the whole download. Sorting is DuckDB's, on disk
where it does not fit in memory, and rows are read and written some at a time: memory does not grow with their number.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mdc.config import DownloadParams
from mdc.data.fetch import SAMPLE_SCHEME
from mdc.data.local import read_folder, read_webdataset
from mdc.data.parts import PART_SCHEMA
from mdc.data.source import Record, answering, check_columns, list_files, read_records
from mdc.data.tables import database, parquet, stream
from mdc.errors import UserError
from mdc.files import sha256, whole_file

ROWS_AT_ONCE = 20_000
JOINED = "joined"  # the status of a row whose captions are with another row of the same URL
PLAN_SCHEMA = pa.schema([PART_SCHEMA.field(name) for name in ("uid", "url", "caption", "captions", "label", "group")])
_ROW_SCHEMA = pa.schema(
    [("number", pa.int64()), ("key", pa.uint64()), ("place", pa.string())]
    + [PART_SCHEMA.field(name) for name in ("uid", "url", "captions", "label", "group")]
)
_UID_SCHEMA = pa.schema([_ROW_SCHEMA.field(name) for name in ("number", "place", "uid")])
READERS = {"images": read_folder, "webdataset": read_webdataset}


def _read_lists(params: DownloadParams) -> Iterator[Record]:
    files = list_files(params.input)
    check_columns(files, params)
    return read_records(files, params)


def _read(params: DownloadParams) -> Iterator[Record]:
    """Every record of the input."""
    with answering(params.input):
        yield from READERS.get(params.kind, _read_lists)(params)


def _key(url: str) -> int:
    return int.from_bytes(hashlib.blake2b(url.encode(), digest_size=8).digest(), "big")


def _texts(captions: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"source": source, "text": text} for source, text in captions]


def _batches(records: Iterable[Record]) -> Iterator[tuple[int, list[Record]]]:
    records, number = iter(records), 0
    while batch := list(islice(records, ROWS_AT_ONCE)):
        yield number, batch
        number += len(batch)


class _Dropped:
    """Writes the rows that are not asked for, and counts them by status."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, PART_SCHEMA)
        self.reasons: Counter[str] = Counter()

    def add(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self.reasons.update(row["status"] for row in rows)
            self._writer.write_table(pa.Table.from_pylist(rows, PART_SCHEMA))

    def close(self) -> None:
        self._writer.close()


def _dropped_row(record: Record) -> dict[str, Any]:
    return {
        **record._asdict(),
        "url": record.url or None,
        "caption": record.captions[0][1] if record.captions else None,
        "captions": _texts(record.captions),
        "status": f"dropped:{record.dropped}",
        "detail": record.place,
    }


def _stage(params: DownloadParams, scratch: Path, dropped: _Dropped) -> Counter[str]:
    """Write records that can be asked for to `rows.parquet`, given uids to `uids.parquet`, others to `dropped`."""
    counts = Counter(rows=0, captions_left_out=0)
    rows = pq.ParquetWriter(scratch / "rows.parquet", _ROW_SCHEMA, compression="zstd")
    uids = pq.ParquetWriter(scratch / "uids.parquet", _UID_SCHEMA, compression="zstd")
    with rows, uids:
        for start, batch in _batches(_read(params)):
            counts["rows"] += len(batch)
            counts["captions_left_out"] += sum(record.left_out for record in batch)
            numbered = [{"number": start + index, **record._asdict()} for index, record in enumerate(batch)]
            asked = [
                {**row, "key": _key(row["url"]), "captions": _texts(row["captions"])}
                for row in numbered
                if not row["dropped"]
            ]
            rows.write_table(pa.Table.from_pylist(asked, _ROW_SCHEMA))
            if params.uid_column:
                given = [row for row in numbered if row["dropped"] != "malformed"]
                uids.write_table(pa.Table.from_pylist(given, _UID_SCHEMA))
            dropped.add([_dropped_row(record) for record in batch if record.dropped])
    return counts


def _check_unique(connection: duckdb.DuckDBPyConnection, uids: Path) -> None:
    twice = connection.execute(
        f"SELECT uid, arg_min(place, number), arg_max(place, number) FROM {parquet(uids)} "
        "GROUP BY uid HAVING count(*) > 1 ORDER BY min(number) LIMIT 1"
    ).fetchone()
    if twice:
        uid, one, other = twice
        raise UserError(f"uid {uid!r} is given twice, at {one} and at {other}; make uids unique")


def _whole_urls(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, no URL in two tables."""
    rest: pa.Table | None = None
    for table in tables:
        table = table if rest is None else pa.concat_tables([rest, table])
        last = pc.index(table["url"], table["url"][-1]).as_py()
        if last:
            yield table.slice(0, last)
        rest = table.slice(last)
    if rest is not None:
        yield rest


def _join(table: pa.Table, dropped: _Dropped) -> pa.Table:
    """One row per URL. Those that do not lead one are `joined` to it, or dropped: `duplicate` or `other_group`."""
    table = table.combine_chunks()
    urls = table["url"].to_numpy(zero_copy_only=False)
    leads = np.concatenate([[True], urls[1:] != urls[:-1]])
    if leads.all():
        return table
    leader_of = (np.cumsum(leads) - 1)[~leads]
    leaders, followers = table.filter(pa.array(leads)), table.filter(pa.array(~leads)).to_pylist()
    changed = {name: leaders[name].to_pylist() for name in ("captions", "label", "group")}
    uids: dict[int, set[str]] = {}
    rows = []
    for at, row in zip(leader_of.tolist(), followers, strict=True):
        leader = leaders["uid"][at].as_py()
        known, captions = uids.setdefault(at, {leader}), changed["captions"][at]
        differs = any(row[name] and changed[name][at] not in ("", row[name]) for name in ("label", "group"))
        if row["uid"] in known:
            status, detail = "dropped:duplicate", row["place"]
        elif differs:
            status, detail = "dropped:other_group", f"{row['place']}: another label or group than {leader} of this URL"
        else:
            status, detail = JOINED, leader
            captions += [text for text in row["captions"] if text not in captions]
            for name in ("label", "group"):
                changed[name][at] = changed[name][at] or row[name]
        known.add(row["uid"])
        rows.append({**row, "caption": _main(row["captions"]), "status": status, "detail": detail})
    dropped.add(rows)
    for name, values in changed.items():
        field = leaders.schema.field(name)
        leaders = leaders.set_column(leaders.column_names.index(name), field, pa.array(values, field.type))
    return leaders


def _main(captions: list[dict[str, str]]) -> str | None:
    return captions[0]["text"] if captions else None


def _planned(table: pa.Table) -> pa.Table:
    """As PLAN_SCHEMA."""
    main = pa.array([_main(captions) for captions in table["captions"].to_pylist()], pa.string())
    return table.append_column("caption", main).select(PLAN_SCHEMA.names).cast(PLAN_SCHEMA)


def _write_parts(tables: Iterator[pa.Table], size: int, path: Path) -> None:
    """Each part becomes a row group of its own."""
    with pq.ParquetWriter(path, PLAN_SCHEMA) as writer:
        rest = PLAN_SCHEMA.empty_table()
        for table in tables:
            rest = pa.concat_tables([rest, table])
            whole = rest.num_rows - rest.num_rows % size
            for start in range(0, whole, size):
                writer.write_table(rest.slice(start, size), row_group_size=size)
            rest = rest.slice(whole)
        if rest.num_rows:
            writer.write_table(rest, row_group_size=size)


class Plan:
    """The rows to ask for, read part by part. A part is a row group of `plan.parquet`."""

    def __init__(self, folder: Path, counts: dict[str, int], reasons: Counter[str]) -> None:
        """counts: rows, captions_left_out. reasons: statuses of the rows that are not asked for."""
        self.path, self.dropped = folder / "plan.parquet", folder / "dropped.parquet"
        self.counts, self.reasons = counts, reasons
        self._file = pq.ParquetFile(self.path)
        self.rows = self._file.metadata.num_rows
        self.parts = self._file.metadata.num_row_groups if self.rows else 0

    def part(self, number: int) -> pa.Table:
        """The rows of a part, as PLAN_SCHEMA."""
        return self._file.read_row_group(number)

    def uids(self, number: int) -> list[str]:
        return self._file.read_row_group(number, columns=["uid"])["uid"].to_pylist()

    def part_rows(self, number: int) -> int:
        return self._file.metadata.row_group(number).num_rows

    def digest(self) -> str:
        return sha256(self.path)

    def of_the_sample(self) -> bool:
        """Whether any URL is the sample's own, which a server on this machine stands for."""
        return any(
            pc.any(pc.starts_with(batch["url"], f"{SAMPLE_SCHEME}:")).as_py()
            for batch in self._file.iter_batches(columns=["url"])
        )

    def close(self) -> None:
        self._file.close()


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder in `folder` that is gone afterwards, as is `folder` where nothing is left in it."""
    scratch = folder / "_plan"
    shutil.rmtree(scratch, ignore_errors=True)  # of a killed run
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)
        if not any(folder.iterdir()):
            folder.rmdir()


def write_plan(params: DownloadParams, folder: Path) -> Plan:
    """Read the input and write `plan.parquet` and `dropped.parquet` (as PART_SCHEMA) into `folder`.

    Statuses of rows that are not asked for: `joined` (its captions are with the row that `detail` names), and
    `dropped:` with no_url, missing_caption, line_break (no caption is without a tab or line break), malformed (wrong
    number of fields, no JSON, or a caption file that is not UTF-8), duplicate (the same URL and captions as another
    row), other_group (the same URL as another row, but another label or group).
    Raises UserError for a missing file or column, an empty list, and uids that are repeated or cannot name a file.
    """
    with (
        _scratch(folder) as scratch,
        whole_file(folder / "dropped.parquet") as dropped_path,
        whole_file(folder / "plan.parquet") as plan_path,
    ):
        dropped = _Dropped(dropped_path)
        counts = _stage(params, scratch, dropped)
        if not counts["rows"]:
            raise UserError(f"download.input: {params.input} has no rows; there is nothing to download")
        if counts["rows"] == dropped.reasons.total():
            raise UserError(f"{params.input}: no row can be asked for: {dict(dropped.reasons)}; mend the input")
        with database(scratch / "sort") as connection:
            _check_unique(connection, scratch / "uids.parquet")
            order = f"SELECT * FROM {parquet(scratch / 'rows.parquet')} ORDER BY key, url, uid, number"
            tables = (table.cast(_ROW_SCHEMA) for table in stream(connection, order, ROWS_AT_ONCE))
            samples = (_planned(_join(table, dropped)) for table in _whole_urls(tables))
            _write_parts(samples, params.samples_per_shard, plan_path)
        dropped.close()
    return Plan(folder, dict(counts), dropped.reasons)
