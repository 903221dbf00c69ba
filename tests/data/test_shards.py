"""Shards: equal bytes for equal inputs, offsets that point at the members, and damage that is noticed."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from mdc.config import ShardParams
from mdc.data.packing import write_shards
from mdc.data.shards import SAMPLES_SCHEMA, read_index, verify_shards
from mdc.data.tars import FixedTar, members
from mdc.errors import UserError


def samples(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "samples.parquet")


def test_fixed_tars_are_what_tarfile_reads(tmp_path: Path) -> None:
    contents = {"a.jpg": b"x" * 512, "b.json": b"", "c.txt": b"y" * 1000}
    with (tmp_path / "a.tar").open("wb") as file:
        tar = FixedTar(file)
        written = [tar.add(name, data) for name, data in contents.items()]
        tar.close()
    assert list(members(tmp_path / "a.tar")) == written
    data = (tmp_path / "a.tar").read_bytes()
    assert len(data) % tarfile.RECORDSIZE == 0
    assert [data[m.offset : m.offset + m.size] for m in written] == list(contents.values())
    with tarfile.open(tmp_path / "a.tar") as read:
        for info in read:
            assert (info.mtime, info.uid, info.gid, info.uname, info.gname) == (0, 0, 0, "", "")


def test_offsets_and_contents(shards: Callable[..., Path], tmp_path: Path) -> None:
    folder = shards()
    captions = pd.concat(map(pd.read_parquet, (tmp_path / "captions").glob("*.parquet"))).set_index("uid")
    table = samples(folder)
    assert set(table["uid"]) == set(captions.index[captions["kept"]])
    assert table["uid"].is_unique
    pictures = {}
    for tar in (tmp_path / "downloaded").glob("*.tar"):
        data = tar.read_bytes()
        pictures |= {m.name: data[m.offset : m.offset + m.size] for m in members(tar)}
    for row in table.itertuples():
        data = (folder / row.shard).read_bytes()
        assert data[row.image_offset : row.image_offset + row.image_bytes] == pictures[f"{row.uid}.jpg"]
        note = json.loads(data[row.json_offset : row.json_offset + row.json_bytes])
        assert note == {
            "uid": row.uid,
            "caption": row.caption,
            "tokens": list(row.tokens),
            "source": "caption",
            "others": [],
            "label": "",
            "group": note["group"],
        }
        assert list(row.tokens) == list(captions.loc[row.uid, "tokens"])
        assert row.split == captions.loc[row.uid, "split"]
        assert row.shard.startswith(row.split)


def test_index_and_order(shards: Callable[..., Path]) -> None:
    folder = shards()
    index = read_index(folder)
    table = samples(folder)
    assert index["image_format"] == "jpg"
    for split, records in index["splits"].items():
        assert [record["samples"] for record in records[:-1]] == [8] * (len(records) - 1)
        assert [record["file"] for record in records] == [f"{split}-{i:05d}.tar" for i in range(len(records))]
        assert sum(record["samples"] for record in records) == (table["split"] == split).sum()
    assert verify_shards(folder) == table["split"].value_counts().to_dict()
    train = table.loc[table["split"] == "train", "uid"].tolist()
    assert train != sorted(train)


def test_webdataset_reads_them(shards: Callable[..., Path]) -> None:
    folder = shards()
    table = samples(folder)
    urls = sorted(str(path) for path in folder.glob("train-*.tar"))
    found = [
        (s["__key__"], s["json"]["caption"], s["jpg"].size)
        for s in webdataset.WebDataset(urls, shardshuffle=False).decode("pil")
    ]
    train = table[table["split"] == "train"]
    assert found == [(row.uid, row.caption, (16, 16)) for row in train.itertuples()]


def test_equal_inputs_give_equal_bytes_and_the_seed_only_reorders(
    shards: Callable[..., Path], tmp_path: Path, files_of: Callable
) -> None:
    folder = shards()
    source, captions = tmp_path / "downloaded", tmp_path / "captions"
    write_shards(ShardParams(samples_per_shard=8), source, captions, tmp_path / "again")
    assert files_of(folder) == files_of(tmp_path / "again")
    write_shards(ShardParams(samples_per_shard=8, seed=1), source, captions, tmp_path / "other")
    assert read_index(tmp_path / "other")["version"] != read_index(folder)["version"]
    assert sorted(samples(tmp_path / "other")["uid"]) == sorted(samples(folder)["uid"])
    write_shards(ShardParams(samples_per_shard=5), source, captions, tmp_path / "smaller")
    assert samples(tmp_path / "smaller")["uid"].tolist() == samples(folder)["uid"].tolist()


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(bytes(data))


def between_members(path: Path) -> None:
    """Cut exactly where a sample ends: tar readers see a shorter tar and no error."""
    third = list(members(path))[4]
    cut(path, third.offset - tarfile.BLOCKSIZE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: cut(path, 700), "has 700 bytes, not"),
        (between_members, "has 5120 bytes, not"),
        (lambda path: cut(path, 0), "has 0 bytes, not"),
        (lambda path: path.unlink(), "is missing"),
        (flip_a_byte, "has another checksum"),
    ],
)
def test_damage_is_noticed(shards: Callable[..., Path], damage: Callable[[Path], Any], message: str) -> None:
    folder = shards()
    damage(folder / "train-00001.tar")
    with pytest.raises(UserError, match=f"train-00001.tar {message}") as caught:
        verify_shards(folder)
    assert "train-00000" not in str(caught.value)
    assert "mdc stage shard" in str(caught.value)


def test_a_list_of_samples_that_does_not_fit_is_noticed(shards: Callable[..., Path]) -> None:
    folder = shards()
    file = pq.ParquetFile(folder / "samples.parquet")
    groups = [file.read_row_group(number).to_pylist() for number in range(file.num_row_groups)]
    groups[0][0]["image_offset"] += 1
    with pq.ParquetWriter(folder / "samples.parquet", SAMPLES_SCHEMA) as writer:
        for rows in groups:
            writer.write_table(pa.Table.from_pylist(rows, SAMPLES_SCHEMA))
    with pytest.raises(UserError, match=r"has members other than samples\.parquet lists"):
        verify_shards(folder)


def test_a_picture_that_is_gone_is_an_error_and_leaves_nothing(
    downloaded: Callable[..., Path], shards: Callable[..., Path], tmp_path: Path
) -> None:
    shards()
    (tmp_path / "downloaded" / "00001.tar").unlink()
    with pytest.raises(UserError, match=r"the picture of 'u0\d\d' is in no tar"):
        write_shards(ShardParams(), tmp_path / "downloaded", tmp_path / "captions", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_index_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mdc stage shard"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_text('{"format": "older"}')
    with pytest.raises(UserError, match="has format 'older'"):
        read_index(tmp_path)
