"""Tables larger than memory: sorting, joining and counting by DuckDB, which puts on disk what does not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from mdc.errors import UserError

MEMORY = "512MB"  # of DuckDB; the rest of a stage takes about as much again
THREADS = 2  # each takes memory of its own
BATCH = 50_000  # rows
DUPLICATES = "duplicates.json"  # of the caption stage, see `alike`


@contextmanager
def database(scratch: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory whose overflow lies in `scratch`. Equal queries with an order give equal rows."""
    scratch.mkdir(parents=True, exist_ok=True)
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": MEMORY,
        "temp_directory": str(scratch),
        "threads": THREADS,
    }
    with duckdb.connect(":memory:", config=settings) as connection:
        connection.execute("SET preserve_insertion_order = false")
        connection.execute("SET enable_progress_bar = false")  # which goes to stdout, of queries that take seconds
        try:
            yield connection
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            raise UserError(f"{scratch}: {error}; make room there and run again") from None


def parquet(*places: Path) -> str:
    """SQL for the rows of all parquet files in a folder, or of the files named."""
    names = [str(place / "*.parquet") if place.is_dir() else str(place) for place in places]
    quoted = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
    return f"read_parquet([{quoted}])"


def stream(connection: duckdb.DuckDBPyConnection, query: str, rows: int = BATCH) -> Iterator[pa.Table]:
    """The result in tables of up to `rows` rows."""
    for batch in connection.sql(query).to_arrow_reader(rows):
        yield pa.Table.from_batches([batch])


def one_row(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    """The first row of the result, which is read to its end."""
    row: tuple[Any, ...] = connection.execute(query).fetchall()[0]
    return row
