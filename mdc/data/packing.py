"""The writing of shards: a plan of which pair goes where, then shard after shard, each finished before it counts.

The order is drawn over the list of uids alone, and each shard then reads its pictures where the download left them. So
memory holds one shard per worker and eight bytes per pair, and a run that was killed goes on where it was.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from mdc.config import ComputeParams, ShardParams
from mdc.data.captions import SPLITS
from mdc.data.columns import FOLDER as COLUMNS
from mdc.data.columns import write_columns
from mdc.data.parallel import ONE_WORKER, for_each
from mdc.data.shards import FORMAT, INDEX, SAMPLES, SAMPLES_SCHEMA, expected_members, verify_shards
from mdc.data.storage import Storage, is_url
from mdc.data.tables import database, one_row, parquet, stream
from mdc.data.tars import FixedTar, members
from mdc.data.tokenizer import FILE as TOKENIZER_FILE
from mdc.data.work import claimed, place, work_beside
from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.files import (
    MANIFEST,
    fingerprint,
    read_json,
    read_manifest,
    sha256,
    whole_file,
    whole_folder,
    write_json,
    write_manifest,
)

PLACES_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("uid", "part", "extension")] + [("start", pa.int64()), ("size", pa.int64())]
)
ORDER_SCHEMA = pa.schema([("uid", pa.string()), ("split", pa.string()), ("place", pa.uint32())])
TEXTS = ("uid", "caption", "source", "tokens", "others", "label", "group")  # of a sample's JSON
PLAN = "plan.json"


def _list_pictures(tar: Path, output: Path) -> None:
    """Where each picture of a part lies."""
    if output.is_file():
        return
    rows = []
    for member in members(tar):
        uid, _, extension = member.name.partition(".")
        row = {"uid": uid, "part": tar.stem, "extension": extension, "start": member.offset, "size": member.size}
        rows.append(row)
    with whole_file(output) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, PLACES_SCHEMA), temporary)


def _ordered(tables: Iterator[pa.Table], counts: dict[str, int], seed: int) -> Iterator[pa.Table]:
    """uid, split and place of pairs that come sorted by split and uid: the order depends on uids and seed alone."""
    split, start = "", 0
    places = np.empty(0, np.int64)
    for table in tables:
        while table.num_rows:
            if table["split"][0].as_py() != split:
                split, start = table["split"][0].as_py(), 0
                generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "shards", split)))
                order = generator.permutation(counts[split])
                places = np.empty(len(order), np.uint32)
                places[order] = np.arange(len(order), dtype=np.uint32)
            part = table.slice(0, counts[split] - start)
            column = pa.array(places[start : start + part.num_rows], pa.uint32())
            yield part.append_column("place", column)
            start += part.num_rows
            table = table.slice(part.num_rows)


def _write_plan(params: ShardParams, captions: Path, places: Path, work: Path) -> dict[str, Any]:
    """One file of rows per shard in `work/plan`; returns samples per shard by name, and the pictures' extension."""
    plan = work / "plan"
    with database(work / "scratch") as db, whole_folder(plan) as temporary:
        db.execute(f"CREATE TEMP VIEW kept AS SELECT * FROM {parquet(captions)} WHERE kept")
        db.execute(f"CREATE TEMP VIEW pictures AS SELECT * FROM {parquet(places)}")
        counts: Counter[str] = Counter(dict(db.execute("SELECT split, count(*) FROM kept GROUP BY split").fetchall()))
        lost = one_row(db, "SELECT min(uid), count(*) FROM kept ANTI JOIN pictures USING (uid)")
        if lost[1]:
            raise UserError(
                f"the picture of {lost[0]!r} is in no tar of the download stage ({lost[1]} are missing); "
                "run `mdc stage download` again"
            )
        order = work / "order.parquet"
        with pq.ParquetWriter(order, ORDER_SCHEMA) as writer:
            for table in _ordered(stream(db, "SELECT uid, split FROM kept ORDER BY split, uid"), counts, params.seed):
                writer.write_table(table.cast(ORDER_SCHEMA))
        query = (
            "SELECT kept.*, part, extension, start, size FROM kept JOIN pictures USING (uid) "
            f"JOIN {parquet(order)} AS ordered USING (uid) ORDER BY kept.split, place"
        )
        shards = dict(_cut(stream(db, query, params.samples_per_shard), params.samples_per_shard, temporary))
        (extension,) = one_row(db, "SELECT min(extension) FROM pictures")
        order.unlink()
        assert sum(shards.values()) == sum(counts.values()), "a uid is listed twice"
        record = {"shards": shards, "image_format": extension}
        write_json(temporary / PLAN, record)
    return record


def _cut(tables: Iterator[pa.Table], size: int, folder: Path) -> Iterator[tuple[str, int]]:
    """Cut rows sorted by split and place into one file per shard; yields its name and its rows."""
    pending: list[pa.Table] = []
    numbers: Counter[str] = Counter()

    def write() -> tuple[str, int]:
        whole = pa.concat_tables(pending)
        split = whole["split"][0].as_py()
        name = f"{split}-{numbers[split]:05d}"
        numbers[split] += 1
        pq.write_table(whole, folder / f"{name}.parquet")
        return name, len(whole)

    for table in tables:
        while table.num_rows:
            split = table["split"][0].as_py()
            if pending and pending[0]["split"][0].as_py() != split:
                yield write()
                pending = []
            room = size - sum(map(len, pending))
            of_split = int(np.searchsorted(table["split"].to_numpy() != split, True))
            part = table.slice(0, min(room, of_split))
            pending.append(part)
            table = table.slice(len(part))
            if len(part) == room:
                yield write()
                pending = []
    if pending:
        yield write()


def _read_pictures(rows: list[dict[str, Any]], downloaded: Path) -> dict[str, bytes]:
    """The stored pictures by uid, tar after tar."""
    pictures = {}
    for part, some in groupby(sorted(rows, key=lambda row: (row["part"], row["start"])), lambda row: row["part"]):
        with (downloaded / f"{part}.tar").open("rb", buffering=0) as tar:
            for row in some:
                tar.seek(row["start"])
                pictures[row["uid"]] = tar.read(row["size"])
    return pictures


def _write_tar(path: Path, rows: list[dict[str, Any]], pictures: dict[str, bytes]) -> list[dict[str, Any]]:
    """Write one shard; returns each sample's row of `samples.parquet`."""
    samples = []
    with path.open("wb") as file:
        tar = FixedTar(file)
        for row in rows:
            uid = row["uid"]
            image = tar.add(f"{uid}.{row['extension']}", pictures[uid])
            text = {name: row[name] for name in TEXTS}
            data = json.dumps(text, sort_keys=True, ensure_ascii=False).encode()
            note = tar.add(f"{uid}.json", data)
            places = {"image_offset": image.offset, "image_bytes": image.size}
            places |= {"json_offset": note.offset, "json_bytes": note.size}
            samples.append({**{name: row.get(name) for name in SAMPLES_SCHEMA.names}, **places})
        tar.close()
    return samples


def _is_stored(record: dict[str, Any], tar: Path, target: str) -> bool:
    """Whether a finished shard is still where it was put."""
    if target:
        return Storage(target).size(tar.name) == record["bytes"]
    return tar.is_file() and tar.stat().st_size == record["bytes"] and sha256(tar) == record["sha256"]


def _store(tar: Path, checksum: str, target: str) -> None:
    """Move a tar to the target, and read it back there."""
    storage = Storage(target)
    storage.put(tar)
    if storage.sha256(tar.name) != checksum:
        raise UserError(f"{target}/{tar.name} is not what was written; run again")
    tar.unlink()


def _pack(name: str, plan: Path, downloaded: Path, shards: Path, target: str) -> dict[str, Any]:
    """Write one shard, its samples and, last, its record, unless they are there."""
    tar, table, record_file = (shards / f"{name}{suffix}" for suffix in (".tar", ".parquet", ".json"))
    if record_file.is_file() and table.is_file():
        record: dict[str, Any] = read_json(record_file)
        if _is_stored(record, tar, target):
            return record
    rows = pq.read_table(plan / f"{name}.parquet").to_pylist()
    with whole_file(tar) as temporary:
        samples = _write_tar(temporary, rows, _read_pictures(rows, downloaded))
    listed = pa.Table.from_pylist([{**sample, "shard": tar.name} for sample in samples], SAMPLES_SCHEMA)
    with whole_file(table) as temporary:
        pq.write_table(listed, temporary)
    record = {"file": tar.name, "samples": len(rows), "bytes": tar.stat().st_size, "sha256": sha256(tar)}
    if list(members(tar)) != expected_members(listed, rows[0]["extension"]):
        raise UserError(f"{tar} is not what was written; the disk may be failing; run again")
    if target:
        _store(tar, record["sha256"], target)
    write_json(record_file, record)
    return record


def _join_samples(shards: Path, records: list[dict[str, Any]], output: Path) -> None:
    """`samples.parquet`: a row group for each shard, in the order of the index."""
    with pq.ParquetWriter(output, SAMPLES_SCHEMA) as writer:
        for record in records:
            writer.write_table(pq.read_table((shards / record["file"]).with_suffix(".parquet")).cast(SAMPLES_SCHEMA))


def _target(params: ShardParams, inputs: dict[str, Any]) -> str:
    """Where the tars go: "" is beside the index; else a folder of their own, where no other version is overwritten."""
    return f"{params.target.rstrip('/')}/{fingerprint(inputs)}" if params.target else ""


def _location(target: str, output: Path) -> str:
    """The same as the index names it: from the folder of the index, unless it is a URL or an absolute path."""
    if not target or is_url(target) or Path(target).is_absolute():
        return target
    return os.path.relpath(target, output)


def _split_of(name: str) -> str:
    return name.rpartition("-")[0]


def _packed(
    params: ShardParams, downloaded: Path, captions: Path, work: Path, compute: ComputeParams, target: str
) -> tuple[list[dict[str, Any]], str]:
    """Finish every shard in `work/shards`, or at `target`; their records in order, and the pictures' extension."""
    tars = sorted(downloaded.glob("*.tar"))
    for _ in for_each(_list_pictures, ((tar, work / "pictures" / f"{tar.stem}.parquet") for tar in tars), compute):
        pass
    plan, shards = work / "plan", work / "shards"
    written = plan / PLAN
    found = read_json(written) if written.is_file() else _write_plan(params, captions, work / "pictures", work)
    names = sorted(found["shards"], key=lambda name: (SPLITS.index(_split_of(name)), int(name.rpartition("-")[2])))
    jobs = ((name, plan, downloaded, shards, target) for name in names)
    records = for_each(_pack, jobs, compute)
    return list(tqdm(records, total=len(names), desc="sharding", unit="shard", leave=False, disable=None)), found[
        "image_format"
    ]


def write_shards(
    params: ShardParams,
    downloaded: Path,
    captions: Path,
    output: Path,
    work: Path | None = None,
    compute: ComputeParams = ONE_WORKER,
) -> None:
    """Join pictures and tokens by uid; write the tars, `samples.parquet` with its columns for training (see `columns`),
    `index.json` and `tokenizer.json`.

    Equal inputs give equal bytes, for any number of workers. Every shard is read back after it is written. The data
    version is a hash over the checksums of all shards and the tokenizer.
    work: keeps finished shards through a kill; None = a folder beside the output. On the output's own file system no
    shard is copied.
    """
    read_manifest(downloaded, made_by="download")
    read_manifest(captions, made_by="caption")
    inputs = {
        "downloaded": sha256(downloaded / MANIFEST),
        "captions": sha256(captions / MANIFEST),
        "params": params.model_dump(mode="json"),
    }
    work = work or work_beside(output)
    target = _target(params, inputs)
    with claimed(work, inputs):
        records, image_format = _packed(params, downloaded, captions, work, compute, target)
        splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for record in records:
            splits[_split_of(record["file"])].append(record)
        with whole_folder(output) as temporary:
            for record in records if not target else ():
                place(work / "shards" / record["file"], temporary / record["file"])
            _join_samples(work / "shards", records, temporary / SAMPLES)
            write_columns(temporary / SAMPLES, temporary / COLUMNS)
            place(captions / TOKENIZER_FILE, temporary / TOKENIZER_FILE)
            version = fingerprint({"shards": splits, "tokenizer": sha256(temporary / TOKENIZER_FILE)})
            index = {
                "format": FORMAT,
                "version": version,
                "image_format": image_format,
                "location": _location(target, output),
            }
            write_json(temporary / INDEX, {**index, "splits": splits})
            if not is_url(target):
                verify_shards(temporary, read_up_to=0)  # each was read back when it was written
            counts = {split: sum(record["samples"] for record in some) for split, some in splits.items()}
            read_back = {record["file"]: {name: record[name] for name in ("bytes", "sha256")} for record in records}
            write_manifest(temporary, inputs, counts, {} if target else read_back, version=version)
