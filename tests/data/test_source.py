"""Lists: columns are checked in every file before anything else, and every record is read or accounted for."""

import gzip
import json
import socket
from pathlib import Path
from typing import Any, Literal

import fsspec
import pandas as pd
import pytest

from mdc.config import DownloadParams
from mdc.data.plan import write_plan
from mdc.data.source import Record, check_columns, check_places, list_files, read_records
from mdc.errors import UserError

WORDS = ["NA", "null", "None", "nan", "", "   ", "N/A"]


def params(place: Path | str, **options: Any) -> DownloadParams:
    return DownloadParams(input=str(place), **options)


def read(params: DownloadParams) -> list[Record]:
    files = list_files(params.input)
    check_columns(files, params)
    return list(read_records(files, params))


def write(path: Path, rows: pd.DataFrame) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        rows.to_parquet(path, index=False)
    else:
        rows.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    return path


def pairs(captions: list[str]) -> pd.DataFrame:
    return pd.DataFrame({"url": [f"http://host/{i}.jpg" for i in range(len(captions))], "caption": captions})


def dropped(records: list[Record]) -> list[str]:
    return [record.dropped for record in records]


def texts(records: list[Record]) -> list[str]:
    """The only caption of each, "" for none."""
    return [text for record in records for _, text in record.captions or [("", "")]]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv"])
def test_a_missing_column_is_named_with_its_file_and_the_close_match(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"a{suffix}", pairs(["x"]))
    write(tmp_path / f"b{suffix}", pairs(["x"]).rename(columns={"url": "Url"}))
    with pytest.raises(UserError) as caught:
        read(params(tmp_path))
    message = str(caught.value)
    for part in (f"b{suffix}", "'url'", "download.url_column", "Url, caption", "did you mean 'Url'?"):
        assert part in message
    assert f"a{suffix}" not in message


def test_all_missing_columns_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)'URL'.*'url'\?.*'TEXT'"):
        read(params(write(tmp_path / "a.csv", pairs(["x"])), url_column="URL", caption_column="TEXT"))


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv"])
def test_words_that_look_like_nothing_are_captions(tmp_path: Path, suffix: str) -> None:
    records = read(params(write(tmp_path / f"a{suffix}", pairs(WORDS))))
    assert texts(records) == ["NA", "null", "None", "nan", "", "", "N/A"]
    assert dropped(records) == ["", "", "", "", "missing_caption", "missing_caption", ""]


def test_null_captions_are_missing(tmp_path: Path) -> None:
    records = read(params(write(tmp_path / "a.parquet", pairs(["x", None]))))  # type: ignore[list-item]
    assert dropped(records) == ["", "missing_caption"]


def test_quotes_are_ordinary_in_tsv(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('url\tcaption\nhttp://h/0\t"broken quote\nhttp://h/1\tplain\nhttp://h/2\tit"s\n')
    assert texts(read(params(path))) == ['"broken quote', "plain", 'it"s']


def test_an_unbalanced_quote_in_csv_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('url,caption\nhttp://h/0,fine\nhttp://h/1,"broken\nhttp://h/2,plain\nhttp://h/3,x\n')
    with pytest.raises(UserError, match=r"a\.csv line 3: .*\.tsv"):
        read(params(path))


def test_line_breaks_in_captions_are_dropped_with_their_place_or_made_spaces(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('url,caption\nhttp://h/0,"two\nlines"\nhttp://h/1,"a, ""b"""\nhttp://h/2\n\nhttp://h/3,c\n')
    records = read(params(path))
    assert dropped(records) == ["line_break", "", "malformed", ""]
    assert [record.place for record in records] == ["a.csv line 2", "a.csv line 4", "a.csv line 5", "a.csv line 7"]
    assert texts(records)[1] == 'a, "b"'
    records = read(params(path, line_breaks="space"))
    assert texts(records)[0] == "two lines"
    assert dropped(records)[0] == ""


def test_lists_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(params(tmp_path / "none.csv"))
    with pytest.raises(UserError, match="no list of a known kind"):
        read(params(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match="not a parquet file"):
        read(params(tmp_path / "a.parquet"))
    (tmp_path / "a.csv").write_bytes(b"url,caption\nhttp://h/0,caf\xe9\n")
    with pytest.raises(UserError, match="not UTF-8"):
        read(params(tmp_path / "a.csv"))
    nested = pd.DataFrame({"url": ["http://h/0"], "caption": [{"a": "b"}]})
    with pytest.raises(UserError, match=r"column 'caption' of type struct.* is no text"):
        read(params(write(tmp_path / "n.parquet", nested)))


@pytest.mark.parametrize("uid", ["a.b", "a/b", "a b", "", "x" * 200, "tab\tbed"])
def test_uids_that_cannot_name_a_file(tmp_path: Path, uid: str) -> None:
    rows = pairs(["x", "y"]).assign(uid=["fine", uid])
    with pytest.raises(UserError, match=r"a\.parquet row 2: uid"):
        read(params(write(tmp_path / "a.parquet", rows), uid_column="uid"))


def test_label_and_group_travel(tmp_path: Path) -> None:
    rows = pairs(["x", "y"]).assign(kind=["k", None], base=[1, 2])
    records = read(params(write(tmp_path / "a.parquet", rows), label_column="kind", group_column="base"))
    assert [record.label for record in records] == ["k", ""]
    assert [record.group for record in records] == ["1", "2"]


def test_outputs_where_the_lists_are_read(tmp_path: Path) -> None:
    lists = tmp_path / "in"
    lists.mkdir()
    (lists / "urls.csv").write_text("url,caption\n")
    link = tmp_path / "link"
    link.symlink_to(lists)
    with pytest.raises(UserError, match="where the list"):
        check_places(f"{lists}/*.csv", lists / "out")
    for output in (lists, lists / "out", link, link / "out", tmp_path):
        with pytest.raises(UserError, match="where the list"):
            check_places(str(lists), tmp_path / "work", output)
        with pytest.raises(UserError, match="where the list"):
            check_places(str(lists), output, tmp_path / "output")
    with pytest.raises(UserError, match="where the list"):
        check_places(str(lists / "urls.csv"), lists)
    check_places(str(lists), tmp_path / "out", tmp_path / "in2")
    check_places(str(lists / "urls.csv"), lists / "out")


PAIRS = [("http://h/0", "a dog"), ("http://h/1", 'a "cat"'), ("http://h/2", "un café")]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.csv.gz", "a.tsv.gz", "a.jsonl.gz", "a.parquet"])
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / name, pd.DataFrame(PAIRS, columns=["url", "caption"])
    if "jsonl" in name:
        rows.to_json(path, orient="records", lines=True)
    elif "parquet" in name:
        rows.to_parquet(path)
    elif "tsv" in name:
        text = "\n".join("\t".join(row) for row in [("url", "caption"), *PAIRS]).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    else:
        rows.to_csv(path, index=False)
    records = read(params(path))
    assert [(record.url, *record.captions) for record in records] == [(url, ("caption", text)) for url, text in PAIRS]
    assert len({record.uid for record in records}) == 3


def test_lines_of_json_that_hold_no_object_are_malformed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"url": "http://h/0", "caption": ["a", null, "b"]}\n{"url": "http://h/1"}\n\n{"url": \n[1]\n'
        '{"url": null, "caption": 7}\n'
    )
    records = read(params(path))
    assert dropped(records) == ["", "missing_caption", "malformed", "malformed", "no_url"]
    assert records[0].captions == [("caption", "a"), ("caption", "b")]
    assert records[4].captions == [("caption", "7")]
    assert records[2].place == "a.jsonl line 4"


def test_json_that_is_no_text_drops_its_record_alone(tmp_path: Path) -> None:
    captions = ['"half a pair \\ud83d"', '"a whole pair \\ud83d\\ude00"', '{"text": "x"}', '[["x"]]', "7"]
    lines = [f'{{"url": "http://h/{number}", "caption": {caption}}}' for number, caption in enumerate(captions)]
    lines += ['{"url": "http://h/\\udc00", "caption": "x"}', '{"url": "http://h/9", "caption": ' + "[" * 10**5]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    records = read(params(tmp_path / "a.jsonl"))
    assert dropped(records) == ["malformed", "", "malformed", "malformed", "", "malformed", "malformed"]
    assert [texts([record])[0] for record in records if not record.dropped] == ["a whole pair \U0001f600", "7"]
    assert records[0].place == "a.jsonl line 1 is not UTF-8"
    assert records[2].place == "a.jsonl line 3 holds no text as its caption"
    assert all("".join((record.place, record.url, record.uid)).encode() for record in records)


def test_a_text_file_lists_urls_without_captions(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("http://h/0\n\n  http://h/1  \n")
    with pytest.raises(UserError, match=r"a\.txt has no column 'caption'.*set download.caption_column to"):
        read(params(path))
    records = read(params(path, caption_column=""))
    assert [(record.url, record.captions, record.dropped) for record in records] == [
        ("http://h/0", [], ""),
        ("http://h/1", [], ""),
    ]


def test_published_lists_as_they_are(tmp_path: Path) -> None:
    """Conceptual Captions name no columns, and have them in either order."""
    cc3m, cc12m = tmp_path / "Train_GCC-training.tsv", tmp_path / "cc12m.tsv"
    cc3m.write_text("".join(f"{text}\t{url}\n" for url, text in PAIRS))
    cc12m.write_text("".join(f"{url}\t{text}\n" for url, text in PAIRS))
    for layout, path in (("cc3m", cc3m), ("cc12m", cc12m)):
        records = read(params(path, layout=layout))
        assert [(record.url, record.captions[0][1]) for record in records] == PAIRS
        assert records[0].place.endswith("line 1")
    with pytest.raises(UserError, match=r"cc3m|'a dog' in its first line, the column 'url'"):
        read(params(cc3m, layout="cc12m"))
    cc12m.write_text("url\tcaption\nhttp://h/0\ta dog\n")
    with pytest.raises(UserError, match=r"empty download\.header"):
        read(params(cc12m, layout="cc12m"))
    cc12m.write_text("http://h/0\ta dog\t7\n")
    with pytest.raises(UserError, match=r"has 3 fields, but download\.header names 2"):
        read(params(cc12m, layout="cc12m"))


def test_every_column_of_captions_is_kept_with_its_name(tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {
            "url": ["http://h/0", "http://h/1", "http://h/2"],
            "re_caption": ["A dog\nin the sun.", None, " "],
            "org_caption": ["dog.jpg", "cat", None],
            "re_clip_score": [0.1, 0.2, 0.3],
        }
    )
    write(tmp_path / "train-00000.parquet", rows)
    records = read(params(f"{tmp_path}/train-*.parquet", layout="recap-datacomp-1b"))
    assert records[0].captions == [("re_caption", "A dog in the sun."), ("org_caption", "dog.jpg")]
    assert records[1].captions == [("org_caption", "cat")]
    assert dropped(records) == ["", "", "missing_caption"]
    strict = read(params(tmp_path, layout="recap-datacomp-1b", line_breaks="drop"))[0]
    assert (strict.captions, strict.left_out, strict.dropped) == ([("org_caption", "dog.jpg")], 1, "")


def coco(path: Path) -> Path:
    """A captions file in COCO's layout: two images, the first with three captions."""
    images = [
        {"license": 5, "file_name": f"{number:012d}.jpg", "coco_url": f"http://h/{number}.jpg", "id": number}
        for number in (9, 25)
    ]
    captions = [(3, 9, "A bowl. \n"), (1, 9, "Food in a bowl"), (4, 25, "A giraffe"), (2, 9, "Lunch")]
    annotations = [{"image_id": image, "id": number, "caption": text} for number, image, text in captions]
    path.write_text(json.dumps({"info": {}, "images": images, "licenses": [], "annotations": annotations}))
    return path


def test_coco_captions(tmp_path: Path) -> None:
    records = read(params(coco(tmp_path / "captions_train2017.json"), layout="coco"))
    assert [(record.uid, record.url) for record in records] == [("9", "http://h/9.jpg"), ("25", "http://h/25.jpg")]
    assert [text for _, text in records[0].captions] == ["Food in a bowl", "Lunch", "A bowl."]
    (tmp_path / "other.json").write_text('[{"url": "http://h/0"}]')
    with pytest.raises(UserError, match=r"other\.json is no captions file as COCO's"):
        read(params(tmp_path / "other.json", layout="coco"))


def test_lists_at_an_address(tmp_path: Path) -> None:
    remote = fsspec.filesystem("memory")
    remote.pipe("/lists/a.csv", b"url,caption\nhttp://h/0,a\n")
    remote.pipe("/lists/b.csv.gz", gzip.compress(b"url,caption\nhttp://h/1,b\n"))
    remote.pipe("/lists/c.parquet", pd.DataFrame({"url": ["http://h/2"], "caption": ["c"]}).to_parquet())
    remote.pipe("/lists/README.txt", b"not a list")
    assert texts(read(params("memory://lists"))) == ["a", "b", "c"]
    assert texts(read(params("memory://lists/*.csv*"))) == ["a", "b"]
    remote.pipe("/lists/d.csv", b"url,text\nhttp://h/0,a\n")
    with pytest.raises(UserError, match=r"memory:///lists/d\.csv has no column 'caption'"):
        read(params("memory://lists/"))
    with pytest.raises(UserError, match="does not exist"):
        read(params("memory://nothing/here.csv"))
    with pytest.raises(UserError, match="cannot be opened"):
        read(params("nosuch://bucket/list.csv"))
    check_places("memory://lists", tmp_path)


@pytest.mark.parametrize("kind", ["urls", "images", "webdataset"])
def test_an_address_that_does_not_answer_is_told(tmp_path: Path, kind: Literal["urls", "images", "webdataset"]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{free.getsockname()[1]}/list.csv"
    with pytest.raises(UserError, match=rf"{place} cannot be read: .*; mend the address"):
        write_plan(params(place, kind=kind), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"url,caption\n" + b"".join(b"http://h/%d,a%d\n" % (i, i * i) for i in range(5000)))
    (tmp_path / "a.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a\.csv\.gz is no whole gzip file"):
        read(params(tmp_path / "a.csv.gz"))
    (tmp_path / "b.csv.gz").write_bytes(b"url,caption\n")
    with pytest.raises(UserError, match=r"b\.csv\.gz is no whole gzip file"):
        read(params(tmp_path / "b.csv.gz"))
