"""Lists: columns are checked in every file before anything else, and every record is read or accounted for."""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from mdc.config import DownloadParams
from mdc.data.source import check_places, read_list
from mdc.errors import UserError

WORDS = ["NA", "null", "None", "nan", "", "   ", "N/A"]


def params(place: Path, **options: str) -> DownloadParams:
    return DownloadParams(input=str(place), **options)


def write(path: Path, rows: pd.DataFrame) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        rows.to_parquet(path, index=False)
    else:
        rows.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    return path


def pairs(captions: list[str]) -> pd.DataFrame:
    return pd.DataFrame({"url": [f"http://host/{i}.jpg" for i in range(len(captions))], "caption": captions})


def statuses(table: pa.Table) -> list[str | None]:
    return table["status"].to_pylist()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv"])
def test_a_missing_column_is_named_with_its_file_and_the_close_match(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"a{suffix}", pairs(["x"]))
    write(tmp_path / f"b{suffix}", pairs(["x"]).rename(columns={"url": "Url"}))
    with pytest.raises(UserError) as caught:
        read_list(params(tmp_path))
    message = str(caught.value)
    for part in (f"b{suffix}", "'url'", "download.url_column", "Url, caption", "did you mean 'Url'?"):
        assert part in message
    assert f"a{suffix}" not in message


def test_all_missing_columns_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)'URL'.*'url'\?.*'TEXT'"):
        read_list(params(write(tmp_path / "a.csv", pairs(["x"])), url_column="URL", caption_column="TEXT"))


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv"])
def test_words_that_look_like_nothing_are_captions(tmp_path: Path, suffix: str) -> None:
    table = read_list(params(write(tmp_path / f"a{suffix}", pairs(WORDS))))
    assert table["caption"].to_pylist() == ["NA", "null", "None", "nan", None, None, "N/A"]
    assert statuses(table).count("dropped:missing_caption") == 2
    assert statuses(table).count(None) == 5


def test_null_captions_are_missing(tmp_path: Path) -> None:
    table = read_list(params(write(tmp_path / "a.parquet", pairs(["x", None]))))  # type: ignore[list-item]
    assert statuses(table) == [None, "dropped:missing_caption"]


def test_quotes_are_ordinary_in_tsv(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('url\tcaption\nhttp://h/0\t"broken quote\nhttp://h/1\tplain\nhttp://h/2\tit"s\n')
    assert read_list(params(path))["caption"].to_pylist() == ['"broken quote', "plain", 'it"s']


def test_an_unbalanced_quote_in_csv_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('url,caption\nhttp://h/0,fine\nhttp://h/1,"broken\nhttp://h/2,plain\nhttp://h/3,x\n')
    with pytest.raises(UserError, match=r"a\.csv line 3: .*\.tsv"):
        read_list(params(path))


def test_line_breaks_in_captions_are_dropped_with_their_place_or_made_spaces(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('url,caption\nhttp://h/0,"two\nlines"\nhttp://h/1,"a, ""b"""\nhttp://h/2\n\nhttp://h/3,c\n')
    table = read_list(params(path))
    assert statuses(table) == ["dropped:line_break", None, "dropped:malformed", None]
    assert table["detail"].to_pylist() == ["a.csv line 2", None, "a.csv line 5", None]
    assert table["caption"].to_pylist()[1] == 'a, "b"'
    table = read_list(params(path, line_breaks="space"))
    assert table["caption"].to_pylist()[0] == "two lines"
    assert statuses(table)[0] is None


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv"])
def test_a_list_without_rows_is_an_error(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UserError, match="no rows"):
        read_list(params(write(tmp_path / f"a{suffix}", pairs([]))))


def test_lists_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_list(params(tmp_path / "none.csv"))
    with pytest.raises(UserError, match="no list of a known kind"):
        read_list(params(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match="not a parquet file"):
        read_list(params(tmp_path / "a.parquet"))
    (tmp_path / "a.csv").write_bytes(b"url,caption\nhttp://h/0,caf\xe9\n")
    with pytest.raises(UserError, match="not UTF-8"):
        read_list(params(tmp_path / "a.csv"))
    nested = pd.DataFrame({"url": ["http://h/0"], "caption": [["a", "b"]]})
    with pytest.raises(UserError, match=r"column 'caption' of type list.* is no text"):
        read_list(params(write(tmp_path / "n.parquet", nested)))


def test_uids_do_not_depend_on_place(tmp_path: Path) -> None:
    rows = pairs(["x", "y", "z"])
    one = read_list(params(write(tmp_path / "one" / "a.csv", rows)))
    write(tmp_path / "two" / "a.parquet", rows.iloc[::-1].iloc[:1])
    write(tmp_path / "two" / "b.tsv", rows.iloc[:2])
    two = read_list(params(tmp_path / "two"))
    assert set(one["uid"].to_pylist()) == set(two["uid"].to_pylist())
    assert len(set(one["uid"].to_pylist())) == 3


def test_a_repeated_row_is_dropped_and_another_caption_of_the_picture_is_not(tmp_path: Path) -> None:
    rows = pd.DataFrame({"url": ["http://h/0"] * 3, "caption": ["x", "x", "y"]})
    table = read_list(params(write(tmp_path / "a.csv", rows)))
    assert statuses(table) == [None, "dropped:duplicate", None]


@pytest.mark.parametrize("uid", ["a.b", "a/b", "a b", "", "x" * 200, "tab\tbed"])
def test_uids_that_cannot_name_a_file(tmp_path: Path, uid: str) -> None:
    rows = pairs(["x", "y"]).assign(uid=["fine", uid])
    with pytest.raises(UserError, match=r"a\.parquet row 2: uid"):
        read_list(params(write(tmp_path / "a.parquet", rows), uid_column="uid"))


def test_repeated_uids_are_an_error_with_both_places(tmp_path: Path) -> None:
    rows = pairs(["x", "y", "z"]).assign(uid=["a", "b", "a"])
    with pytest.raises(UserError, match=r"'a' is given twice, at a\.csv line 2 and at a\.csv line 4"):
        read_list(params(write(tmp_path / "a.csv", rows), uid_column="uid"))


def test_label_and_group_travel(tmp_path: Path) -> None:
    rows = pairs(["x", "y"]).assign(kind=["k", None], base=[1, 2])
    table = read_list(params(write(tmp_path / "a.parquet", rows), label_column="kind", group_column="base"))
    assert table["label"].to_pylist() == ["k", ""]
    assert table["group"].to_pylist() == ["1", "2"]


def test_outputs_where_the_lists_are_read(tmp_path: Path) -> None:
    lists = tmp_path / "in"
    lists.mkdir()
    (lists / "urls.csv").write_text("url,caption\n")
    link = tmp_path / "link"
    link.symlink_to(lists)
    for output in (lists, lists / "out", link, link / "out", tmp_path):
        with pytest.raises(UserError, match="where the list"):
            check_places(lists, tmp_path / "work", output)
        with pytest.raises(UserError, match="where the list"):
            check_places(lists, output, tmp_path / "output")
    with pytest.raises(UserError, match="where the list"):
        check_places(lists / "urls.csv", lists)
    check_places(lists, tmp_path / "out", tmp_path / "in2")
    check_places(lists / "urls.csv", lists / "out")
