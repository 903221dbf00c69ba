"""Pictures that are here already: captions found beside them, the same rules and outputs as for downloads."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pytest
from misbehaving import encoded, picture

from mdc.config import ComputeParams, DownloadParams
from mdc.data.download import download, read_metadata
from mdc.data.fetch import FetchFailed
from mdc.data.local import read_folder, read_here, read_webdataset
from mdc.data.source import root_address
from mdc.data.tars import members
from mdc.errors import UserError
from mdc.files import read_json

COMPUTE = ComputeParams(download_threads=4)


def params(place: Path, kind: str, **options: Any) -> DownloadParams:
    return DownloadParams.model_validate({"input": str(place), "kind": kind, "image_size": 8, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures in two folders with captions of every kind beside them."""
    root = tmp_path / "pictures"
    (root / "deeper").mkdir(parents=True)
    for number, name in enumerate(["a.png", "b.JPG", "deeper/c.webp", "d.png", "e.png", "f.png"]):
        kind = {".JPG": "JPEG", ".webp": "WEBP"}.get(Path(name).suffix, "PNG")
        (root / name).write_bytes(encoded(picture(number), kind))
    (root / "a.txt").write_text("a dog\n")
    (root / "b.json").write_text(json.dumps({"caption": "a cat", "kind": "animal"}))
    (root / "deeper" / "c.txt").write_text("a house")
    (root / "deeper" / "c.json").write_text(json.dumps({"caption": "a red house"}))
    (root / "e.png").write_bytes(b"<html>")
    (root / "e.txt").write_text("no picture")
    (root / "f.txt").write_text("two\nlines")
    (root / "notes.txt").write_text("of nothing")
    return root


def test_a_folder_of_pictures_with_captions_beside_them(tmp_path: Path, folder: Path) -> None:
    output = tmp_path / "downloaded"
    download(params(folder, "images", label_column="kind"), COMPUTE, tmp_path / "work", output, progress=False)
    rows = {row["url"]: row for row in read_metadata(output).to_pylist()}
    assert {url: row["status"] for url, row in rows.items()} == {
        "a.png": "ok",
        "b.JPG": "ok",
        "deeper/c.webp": "ok",
        "d.png": "dropped:missing_caption",
        "e.png": "failed:decode",
        "f.png": "dropped:line_break",
    }
    assert (rows["b.JPG"]["caption"], rows["b.JPG"]["label"]) == ("a cat", "animal")
    found = [(caption["source"], caption["text"]) for caption in rows["deeper/c.webp"]["captions"]]
    assert found == [("txt", "a house"), ("caption", "a red house")]
    assert rows["a.png"]["original_width"] == 24
    stored = {member.name for tar in output.glob("*.tar") for member in members(tar)}
    assert stored == {f"{row['uid']}.jpg" for row in rows.values() if row["status"] == "ok"}
    assert read_json(output / "manifest.json")["counts"]["ok"] == 3


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_a_file_of_metadata_in_the_folder(tmp_path: Path, folder: Path, name: str) -> None:
    rows = pd.DataFrame({"file_name": ["a.png", "deeper/c.webp", "gone.png"], "caption": ["x", "y", "z"]})
    if name.endswith("csv"):
        rows.to_csv(folder / name, index=False)
    else:
        rows.to_json(folder / name, orient="records", lines=True)
    output = tmp_path / "downloaded"
    with pytest.raises(UserError, match="has no column 'url'"):
        read_folder(params(folder, "images"))
    download(params(folder, "images", url_column="file_name"), COMPUTE, tmp_path / "work", output, progress=False)
    found = {row["url"]: row["status"] for row in read_metadata(output).to_pylist()}
    assert found == {"a.png": "ok", "deeper/c.webp": "ok", "gone.png": "failed:not_found"}
    encoded_now = encoded(picture(9))
    (folder / "gone.png").write_bytes(encoded_now)
    download(params(folder, "images", url_column="file_name"), COMPUTE, tmp_path / "work", output, progress=False)
    assert {row["status"] for row in read_metadata(output).to_pylist()} == {"ok"}


def test_paths_do_not_lead_out_of_the_folder(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    for path in ("../secret.png", str(tmp_path / "secret.png"), "deeper/../../secret.png"):
        with pytest.raises(FetchFailed, match="bad_url"):
            read_here(path, str(folder), "images", 10**6)
    with pytest.raises(FetchFailed, match="too_large"):
        read_here("a.png", str(folder), "images", 10)
    with pytest.raises(FetchFailed, match="unreadable"):
        read_here("deeper", str(folder), "images", 10**9)


def test_pictures_at_an_address(tmp_path: Path, folder: Path) -> None:
    remote = fsspec.filesystem("memory")
    remote.put(str(folder), "/pictures", recursive=True)
    shard = write_tar(tmp_path / "shards" / "0.tar", {"0.png": encoded(picture(7)), "0.txt": b"a dog"})
    remote.put(str(shard), "/shards/0.tar")
    for kind, place in (("images", "memory://pictures"), ("webdataset", "memory://shards/*.tar")):
        given = DownloadParams.model_validate({"input": place, "kind": kind})
        read = {"images": read_folder, "webdataset": read_webdataset}[kind]
        urls = [record.url for record in read(given) if not record.dropped]
        assert len(urls) == {"images": 4, "webdataset": 1}[kind]
        body = read_here(urls[0], root_address(place), kind, 10**6)
        assert body == {"images": (folder / "a.png").read_bytes(), "webdataset": encoded(picture(7))}[kind]


def test_a_caption_file_that_is_no_text_drops_its_picture_alone(tmp_path: Path, folder: Path) -> None:
    (folder / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "b.json").write_text("[1]")
    (folder / "deeper" / "c.json").write_text('{"caption": ')
    (folder / "f.txt").write_text("a lamp")
    download(params(folder, "images"), COMPUTE, tmp_path / "work", tmp_path / "downloaded", progress=False)
    rows = {row["url"]: row for row in read_metadata(tmp_path / "downloaded").to_pylist()}
    assert {url: row["status"] for url, row in rows.items()} == {
        "a.png": "dropped:malformed",
        "b.JPG": "dropped:malformed",
        "deeper/c.webp": "dropped:malformed",
        "d.png": "dropped:missing_caption",
        "e.png": "failed:decode",
        "f.png": "ok",
    }
    assert rows["a.png"]["detail"] == "a.png (.txt) is not UTF-8: unexpected end of data"
    assert rows["b.JPG"]["detail"] == "b.JPG (.json) holds list, not a JSON object with a caption"
    assert rows["deeper/c.webp"]["detail"].startswith("deeper/c.webp (.json) is not JSON: Expecting value")
    assert read_json(tmp_path / "downloaded" / "manifest.json")["counts"]["reasons"]["dropped:malformed"] == 3


def test_folders_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        list(read_folder(params(folder / "a.png", "images")))
    for name in ("metadata.csv", "metadata.jsonl"):
        (folder / name).write_text("")
    with pytest.raises(UserError, match="2 files named metadata"):
        list(read_folder(params(folder, "images")))


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_webdataset_shards(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    write_tar(
        shards / "00000.tar",
        {
            "000.png": encoded(picture(0)),
            "000.txt": b"a dog",
            "000.json": json.dumps({"caption": "a dog", "url": "http://h/0", "key": "000"}).encode(),
            "001.txt": b"no picture",
            "sub/002.jpg": encoded(picture(2), "JPEG"),
            "sub/002.json": json.dumps({"caption": "a cat", "org": "cat.jpg"}).encode(),
        },
    )
    hill = {"000.seg.png": b"a mask", "000.webp": encoded(picture(3), "WEBP"), "000.txt": b"a hill"}
    write_tar(shards / "00001.tar", hill)
    output = tmp_path / "downloaded"
    given = params(shards, "webdataset", caption_column=["caption", "org"])
    download(given, COMPUTE, tmp_path / "work", output, progress=False)
    rows = {(row["url"] or "").partition("#")[0]: row for row in read_metadata(output).to_pylist()}
    assert {url: row["status"] for url, row in rows.items()} == {
        "00000.tar/000.png": "ok",
        "": "dropped:no_url",
        "00000.tar/sub/002.jpg": "ok",
        "00001.tar/000.webp": "ok",
    }
    captions = {url: [(c["source"], c["text"]) for c in row["captions"]] for url, row in rows.items()}
    assert captions["00000.tar/000.png"] == [("caption", "a dog")]
    assert captions["00000.tar/sub/002.jpg"] == [("caption", "a cat"), ("org", "cat.jpg")]
    assert len(list(members(next(output.glob("*.tar"))))) == 3
    keyed = read_webdataset(params(shards / "00001.tar", "webdataset", uid_column="__key__"))
    assert [record.uid for record in keyed] == ["000"]


def test_what_lies_where_in_a_shard_does_not_change_its_uids(tmp_path: Path) -> None:
    first, second = {"0.png": encoded(picture(0)), "0.txt": b"a"}, {"1.png": encoded(picture(1)), "1.txt": b"b"}
    uids = []
    for name, files in (("one", first | second), ("two", second | first)):
        write_tar(tmp_path / name / "0.tar", files)
        uids.append({record.uid for record in read_webdataset(params(tmp_path / name, "webdataset"))})
    assert uids[0] == uids[1]
    assert len(uids[0]) == 2


def test_shards_that_are_no_whole_tars_are_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a" / "0.tar", {"0.png": bytes(5000), "0.txt": b"a"})
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"0\.tar is no whole, uncompressed tar"):
        list(read_webdataset(params(tmp_path / "a", "webdataset")))
    path.write_bytes(b"not a tar at all" * 100)
    with pytest.raises(UserError, match=r"0\.tar is no whole, uncompressed tar"):
        list(read_webdataset(params(tmp_path / "a", "webdataset")))
    with pytest.raises(UserError, match=r"holds no \.tar"):
        list(read_webdataset(params(tmp_path / "a" / "*.zip", "webdataset")))
