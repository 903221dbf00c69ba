"""What a list of pairs became: coverage, reasons, hosts, sizes, lengths and duplicates, counted by DuckDB."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pyarrow.parquet as pq

from mdc.data.shards import read_index
from mdc.data.tables import DUPLICATES, database, one_row, parquet
from mdc.files import MANIFEST, read_json, read_whole

HOSTS = 15  # at most, listed
SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)  # quantiles
HOST = r"regexp_extract(url, '^[a-zA-Z]+://([^/?#]*)', 1)"


@dataclass(frozen=True)
class Host:
    name: str
    listed: int  # rows of the list
    stored: int  # of which a picture was stored


@dataclass(frozen=True)
class Stats:
    """Counts of rows unless said otherwise. What a stage that has not run would tell is empty."""

    statuses: dict[str, int]  # of the download, the most frequent first
    hosts: list[Host]  # with the most rows
    host_count: int
    sides: dict[int, int]  # pictures by their shorter side as it came: from this power of two to the next
    reasons: dict[str, int]  # of the caption stage
    captions: dict[str, int]  # captions by reason; a row may have several
    sources: dict[str, int]  # captions kept, by source
    splits: dict[str, int]
    tokens: list[float]  # of the kept captions, at `SHARES`
    characters: list[float]
    duplicates: dict[str, Any]  # see `alike`
    shards: int
    shard_bytes: int


def _counted(db: duckdb.DuckDBPyConnection, query: str) -> dict[Any, int]:
    return dict(db.execute(query).fetchall())


def _quantiles(db: duckdb.DuckDBPyConnection, value: str) -> list[float]:
    (found,) = one_row(db, f"SELECT quantile_disc({value}, {list(SHARES)}) FROM captioned WHERE kept")
    return [float(number) for number in found or []]


def read_stats(downloaded: Path, captions: Path, shards: Path) -> Stats:
    """Read what the stages left. Raises UserError where nothing was downloaded, and where files are not whole."""
    stages = {"download": downloaded, "caption": captions, "shard": shards}
    captioned, packed = ((folder / MANIFEST).is_file() for folder in (captions, shards))
    there = [stage for stage, is_there in zip(stages, (True, captioned, packed), strict=True) if is_there]
    manifests = {stage: read_whole(stages[stage], made_by=stage, read_up_to=0) for stage in there}
    index = read_index(shards) if packed else {"splits": {}}
    records = [record for some in index["splits"].values() for record in some]
    counts = manifests["caption"]["counts"] if captioned else {}
    with TemporaryDirectory() as scratch, database(Path(scratch)) as db:
        db.execute(f"CREATE TEMP VIEW listed AS SELECT * FROM {parquet(downloaded)}")
        if captioned:
            db.execute(f"CREATE TEMP VIEW captioned AS SELECT * FROM {parquet(captions)}")
        hosts = db.execute(
            f"SELECT {HOST} AS host, count(*) AS n, count(*) FILTER (status = 'ok') FROM listed WHERE url IS NOT NULL "
            f"GROUP BY host ORDER BY n DESC, host LIMIT {HOSTS}"
        ).fetchall()
        side = "(2 ** floor(log2(least(original_width, original_height))))::BIGINT"
        sized = "original_width" in pq.read_schema(min(downloaded.glob("*.parquet"))).names
        return Stats(
            statuses=_counted(db, "SELECT status, count(*) AS n FROM listed GROUP BY status ORDER BY n DESC, status"),
            hosts=[Host(*row) for row in hosts],
            host_count=one_row(db, f"SELECT count(DISTINCT {HOST}) FROM listed WHERE url IS NOT NULL")[0],
            sides=_counted(
                db,
                f"SELECT {side} AS side, count(*) FROM listed WHERE status = 'ok' AND original_width > 0 "
                "GROUP BY side ORDER BY side",
            )
            if sized
            else {},
            reasons=counts.get("reasons", {}),
            captions=counts.get("captions", {}),
            sources=_counted(
                db,
                "SELECT source, count(*) AS n FROM (SELECT source FROM captioned WHERE kept UNION ALL "
                "SELECT unnest(others).source FROM captioned WHERE kept) GROUP BY source ORDER BY n DESC, source",
            )
            if captioned
            else {},
            splits=counts.get("splits", {}),
            tokens=_quantiles(db, "len(tokens)") if captioned else [],
            characters=_quantiles(db, "length(caption)") if captioned else [],
            duplicates=read_json(captions / DUPLICATES) if captioned else {},
            shards=len(records),
            shard_bytes=sum(record["bytes"] for record in records),
        )
