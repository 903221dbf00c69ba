"""The final WebDataset shards: image and tokens of each kept pair, shuffled once, with an index of offsets.

They are read and checked here; `packing` writes them.
"""

import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mdc.data.captions import OTHER, SPLITS
from mdc.data.columns import FOLDER as COLUMNS
from mdc.data.columns import Columns
from mdc.data.storage import is_url, tar_folder
from mdc.data.tars import Member, members
from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.files import read_json, sha256

INDEX = "index.json"
SAMPLES = "samples.parquet"
FORMAT = "mdc-shards-2"
SAMPLES_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("split", pa.string()),
        ("shard", pa.string()),
        ("image_offset", pa.int64()),
        ("image_bytes", pa.int64()),
        ("json_offset", pa.int64()),
        ("json_bytes", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("caption", pa.string()),
        ("source", pa.string()),
        ("others", pa.list_(OTHER)),
        ("label", pa.string()),
        ("group", pa.string()),
    ]
)


def read_index(folder: Path) -> dict[str, Any]:
    """`index.json`: format, version, image_format, location of the tars ("" = beside it), and per split the file,
    samples, bytes and sha256 of each shard. Offsets are in `samples.parquet`, with a row group for each shard.
    """
    path = folder / INDEX
    if not path.is_file():
        raise UserError(f"{path} is not there; run `mdc stage shard`")
    try:
        index: dict[str, Any] = read_json(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); run `mdc stage shard` again") from None
    if index.get("format") != FORMAT:
        raise UserError(f"{path} has format {index.get('format')!r}, not {FORMAT!r}; run `mdc stage shard` again")
    return index


def expected_members(samples: pa.Table, extension: str) -> list[Member]:
    """The members of a shard with these rows of `samples.parquet`."""
    names = ("uid", "image_offset", "image_bytes", "json_offset", "json_bytes")
    expected: list[Member] = []
    for uid, *at in zip(*(samples[name].to_pylist() for name in names), strict=True):
        expected += [Member(f"{uid}.{extension}", *at[:2]), Member(f"{uid}.json", *at[2:])]
    return expected


class _Listed:
    """What `samples.parquet` and the columns say of the samples, rows in the order of the shards."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.samples = pq.ParquetFile(folder / SAMPLES)
        self.columns = Columns(folder / COLUMNS)
        self.extension: str = index["image_format"]
        self.is_subset = "subset_of" in index  # its shards hold other samples too

    def problem(self, number: int, shard: str, rows: slice, found: list[Member]) -> str:
        """number: of the shard, and so of its row group. rows: of the shard, by the index. found: its members."""
        table = self.samples.read_row_group(number, columns=[name for name in SAMPLES_SCHEMA.names if name != "others"])
        expected = expected_members(table, self.extension)
        holds = set(expected) <= set(found) if self.is_subset else expected == found
        if not holds or set(table["shard"].to_pylist()) != {shard}:
            return f"has members other than {SAMPLES} lists"
        columns = self.columns
        own = (columns.uids(np.arange(rows.start, rows.stop)), columns.image_offset[rows], columns.image_bytes[rows])
        listed = [table[name].to_pylist() for name in ("uid", "image_offset", "image_bytes")]
        same = [list(own[0]), *(part.tolist() for part in own[1:])] == listed
        return "" if same else f"has members other than {COLUMNS}/ lists"


def _size_problem(path: Path, record: dict[str, Any]) -> str:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return f"has {size} bytes, not {record['bytes']}" if size != record["bytes"] else ""


def _content_problem(path: Path, record: dict[str, Any], rows: slice, listed: _Listed, number: int) -> str:
    if sha256(path) != record["sha256"]:
        return "has another checksum than the index says"
    try:
        found = list(members(path))
    except tarfile.ReadError as error:
        return f"is no readable tar ({error})"
    if len(found) != 2 * record["samples"] and not listed.is_subset:
        return f"holds {len(found)} members, not 2 x {record['samples']}"
    return listed.problem(number, path.name, rows, found)


def _some_of(sizes: list[int], read_up_to: float, version: str) -> set[int]:
    """Shards to read: a draw of as many as have no more than `read_up_to` bytes together."""
    order = np.random.Generator(np.random.PCG64(derive_seed(version, "read"))).permutation(len(sizes))
    return set(order[np.cumsum(np.array(sizes)[order]) <= read_up_to].tolist()) if sizes else set()


def verify_shards(folder: Path, read_up_to: float = math.inf) -> dict[str, int]:
    """Compare every shard with the index. Returns samples per split.

    Counts and sizes are compared always; checksum, members and offsets of all shards, or of a draw of them with no
    more than `read_up_to` bytes together. Raises UserError that names each damaged shard.
    """
    index = read_index(folder)
    counts = {split: sum(record["samples"] for record in records) for split, records in index["splits"].items()}
    listed, tars = _Listed(folder, index), tar_folder(folder, index)
    for name, count in ((SAMPLES, listed.samples.metadata.num_rows), (f"{COLUMNS}/", len(listed.columns))):
        if count != sum(counts.values()):
            raise UserError(f"{folder / name} lists {count} samples, the index {counts}; run `mdc stage shard` again")
    records = [record for split in SPLITS for record in index["splits"][split]]
    if listed.samples.num_row_groups != len(records):
        raise UserError(f"{folder / SAMPLES} has no row group per shard; run `mdc stage shard` again")
    read = _some_of([record["bytes"] for record in records], read_up_to, index["version"])
    problems, row = [], 0
    for number, record in enumerate(records):
        path, rows = tars / record["file"], slice(row, row + record["samples"])
        row = rows.stop
        problem = _size_problem(path, record)
        if not problem and number in read:
            problem = _content_problem(path, record, rows, listed, number)
        if problem:
            problems.append(f"{path} {problem}")
    if problems:
        mend = "Run `mdc data fetch`" if is_url(index["location"]) else "Run `mdc stage shard` again"
        raise UserError("\n".join(problems) + f"\n{mend}")
    return counts
