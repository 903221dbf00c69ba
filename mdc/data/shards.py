"""The final WebDataset shards: image and tokens of each kept pair, shuffled once, with an index of offsets."""

import json
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mdc.config import ShardParams
from mdc.data.captions import FILE as CAPTIONS_FILE
from mdc.data.captions import SPLITS
from mdc.data.columns import FOLDER as COLUMNS
from mdc.data.columns import Columns, write_columns
from mdc.data.tars import FixedTar, Member, members
from mdc.data.tokenizer import FILE as TOKENIZER_FILE
from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.files import MANIFEST, fingerprint, read_json, read_manifest, sha256, whole_folder, write_json, write_manifest

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
        ("label", pa.string()),
        ("group", pa.string()),
    ]
)


class _Pictures:
    """The stored pictures of the download stage by uid, read in place."""

    def __init__(self, downloaded: Path) -> None:
        self._files = [path.open("rb") for path in sorted(downloaded.glob("*.tar"))]
        self._places: dict[str, tuple[int, Member]] = {}
        self.extension = ""
        for number, file in enumerate(self._files):
            for member in members(Path(file.name)):
                uid, _, self.extension = member.name.partition(".")
                self._places[uid] = (number, member)

    def read(self, uid: str) -> bytes:
        if uid not in self._places:
            raise UserError(
                f"the picture of {uid!r} is in no tar of the download stage; run `mdc stage download` again"
            )
        number, member = self._places[uid]
        file = self._files[number]
        file.seek(member.offset)
        return file.read(member.size)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _shuffled(table: pa.Table, split: str, seed: int) -> pa.Table:
    """The kept rows of a split, sorted by uid and then shuffled: the order depends on uids and seed alone."""
    rows = table.filter(pc.and_(table["kept"], pc.equal(table["split"], split))).sort_by("uid")
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "shards", split)))
    return rows.take(generator.permutation(rows.num_rows))


def _write_shard(path: Path, rows: list[dict[str, Any]], pictures: _Pictures) -> Iterator[dict[str, Any]]:
    """Write one tar and yield each sample's row of `samples.parquet`."""
    with path.open("wb") as file:
        tar = FixedTar(file)
        for row in rows:
            uid = row["uid"]
            text = {name: row[name] for name in ("uid", "caption", "tokens", "label", "group")}
            image = tar.add(f"{uid}.{pictures.extension}", pictures.read(uid))
            data = json.dumps(text, sort_keys=True, ensure_ascii=False).encode()
            note = tar.add(f"{uid}.json", data)
            places = {"image_offset": image.offset, "image_bytes": image.size}
            places |= {"json_offset": note.offset, "json_bytes": note.size}
            yield {**{name: row.get(name) for name in SAMPLES_SCHEMA.names}, **places, "shard": path.name}
        tar.close()


def write_shards(params: ShardParams, downloaded: Path, captions: Path, output: Path) -> None:
    """Join pictures and tokens by uid; write the tars, `samples.parquet` with its columns for training (see `columns`),
    `index.json` and `tokenizer.json`.

    Equal inputs give equal bytes. The data version is a hash over the checksums of all shards and the tokenizer.
    """
    read_manifest(downloaded, made_by="download")
    read_manifest(captions, made_by="caption")
    table = pq.read_table(captions / CAPTIONS_FILE)
    pictures = _Pictures(downloaded)
    samples: list[dict[str, Any]] = []
    splits: dict[str, list[dict[str, Any]]] = {}
    with whole_folder(output) as temporary:
        for split in SPLITS:
            rows = _shuffled(table, split, params.seed)
            splits[split] = []
            for number, start in enumerate(range(0, rows.num_rows, params.samples_per_shard)):
                part = rows.slice(start, params.samples_per_shard).to_pylist()
                path = temporary / f"{split}-{number:05d}.tar"
                samples.extend(_write_shard(path, part, pictures))
                record = {"file": path.name, "samples": len(part), "bytes": path.stat().st_size, "sha256": sha256(path)}
                splits[split].append(record)
        pictures.close()
        pq.write_table(pa.Table.from_pylist(samples, SAMPLES_SCHEMA), temporary / SAMPLES)
        write_columns(temporary / SAMPLES, temporary / COLUMNS)
        (temporary / TOKENIZER_FILE).write_bytes((captions / TOKENIZER_FILE).read_bytes())
        version = fingerprint({"shards": splits, "tokenizer": sha256(temporary / TOKENIZER_FILE)})
        index = {"format": FORMAT, "version": version, "image_format": pictures.extension, "splits": splits}
        write_json(temporary / INDEX, index)
        verify_shards(temporary)
        counts = {split: sum(shard["samples"] for shard in shards) for split, shards in splits.items()}
        inputs = {
            "downloaded": sha256(downloaded / MANIFEST),
            "captions": sha256(captions / MANIFEST),
            "params": params.model_dump(mode="json"),
        }
        write_manifest(temporary, inputs, counts, version=version)


def read_index(folder: Path) -> dict[str, Any]:
    """`index.json`: format, version, image_format, and per split the file, samples, bytes and sha256 of each shard."""
    path = folder / INDEX
    if not path.is_file():
        raise UserError(f"{path} is not there; run `mdc stage shard`")
    index = read_json(path)
    if index.get("format") != FORMAT:
        raise UserError(f"{path} has format {index.get('format')!r}, not {FORMAT!r}; run `mdc stage shard` again")
    return index


class _Listed:
    """What `samples.parquet` and the columns say of the samples, rows in the order of the shards."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        names = ["uid", "shard", "image_offset", "image_bytes", "json_offset", "json_bytes"]
        self.table = pq.read_table(folder / SAMPLES, columns=names, read_dictionary=["shard"])
        self.columns = Columns(folder / COLUMNS)
        self.extension: str = index["image_format"]

    def problem(self, shard: str, rows: slice, found: list[Member]) -> str:
        """rows: of the shard, by the index. found: its members."""
        table = self.table.slice(rows.start, rows.stop - rows.start)
        places = [table[name].to_pylist() for name in self.table.column_names[2:]]
        expected: list[Member] = []
        for uid, *at in zip(table["uid"].to_pylist(), *places, strict=True):
            expected += [Member(f"{uid}.{self.extension}", *at[:2]), Member(f"{uid}.json", *at[2:])]
        if found != expected or set(table["shard"].to_pylist()) != {shard}:
            return f"has members other than {SAMPLES} lists"
        columns = self.columns
        own = (columns.uids(np.arange(rows.start, rows.stop)), columns.image_offset[rows], columns.image_bytes[rows])
        same = own[0] == table["uid"].to_pylist() and [part.tolist() for part in own[1:]] == places[:2]
        return "" if same else f"has members other than {COLUMNS}/ lists"


def _size_problem(path: Path, record: dict[str, Any]) -> str:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return f"has {size} bytes, not {record['bytes']}" if size != record["bytes"] else ""


def _content_problem(path: Path, record: dict[str, Any], rows: slice, listed: _Listed) -> str:
    if sha256(path) != record["sha256"]:
        return "has another checksum than the index says"
    try:
        found = list(members(path))
    except tarfile.ReadError as error:
        return f"is no readable tar ({error})"
    if len(found) != 2 * record["samples"]:
        return f"holds {len(found)} members, not 2 x {record['samples']}"
    return listed.problem(path.name, rows, found)


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
    listed = _Listed(folder, index)
    for name, count in ((SAMPLES, listed.table.num_rows), (f"{COLUMNS}/", len(listed.columns))):
        if count != sum(counts.values()):
            raise UserError(f"{folder / name} lists {count} samples, the index {counts}; run `mdc stage shard` again")
    records = [record for split in SPLITS for record in index["splits"][split]]
    read = _some_of([record["bytes"] for record in records], read_up_to, index["version"])
    problems, row = [], 0
    for number, record in enumerate(records):
        path, rows = folder / record["file"], slice(row, row + record["samples"])
        row = rows.stop
        problem = _size_problem(path, record)
        if not problem and number in read:
            problem = _content_problem(path, record, rows, listed)
        if problem:
            problems.append(f"{path} {problem}")
    if problems:
        raise UserError("\n".join(problems) + "\nRun `mdc stage shard` again")
    return counts
