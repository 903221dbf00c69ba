"""The plan of a download: each URL once, in an order that contents alone decide, every row in it or dropped."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdc.config import DownloadParams
from mdc.data.plan import PLAN_SCHEMA, Plan, write_plan
from mdc.errors import UserError


def plan_of(rows: pd.DataFrame, folder: Path, **options: Any) -> Plan:
    folder.mkdir(parents=True)
    rows.to_parquet(folder / "list.parquet", index=False)
    return write_plan(DownloadParams(input=str(folder / "list.parquet"), **options), folder / "work")


def planned(plan: Plan) -> list[dict[str, Any]]:
    return [row for part in range(plan.parts) for row in plan.part(part).to_pylist()]


def texts(row: dict[str, Any]) -> list[str]:
    return [caption["text"] for caption in row["captions"]]


def pairs(count: int) -> pd.DataFrame:
    rows = range(count)
    return pd.DataFrame({"url": [f"http://h/{i}.jpg" for i in rows], "caption": [f"caption {i}" for i in rows]})


def test_rows_of_one_url_become_one_sample_with_all_captions(tmp_path: Path) -> None:
    rows = pd.DataFrame({"url": ["http://h/0"] * 4 + ["http://h/1"], "caption": ["x", "y", "x", "z", "x"]})
    plan = plan_of(rows, tmp_path / "one")
    by_url = {row["url"]: row for row in planned(plan)}
    assert sorted(texts(by_url["http://h/0"])) == ["x", "y", "z"]
    assert texts(by_url["http://h/1"]) == ["x"]
    assert by_url["http://h/0"]["caption"] == texts(by_url["http://h/0"])[0]
    assert plan.reasons == {"joined": 2, "dropped:duplicate": 1}
    others = pq.read_table(plan.dropped).to_pylist()
    assert {row["detail"] for row in others if row["status"] == "joined"} == {by_url["http://h/0"]["uid"]}
    assert plan.rows + plan.reasons.total() == plan.counts["rows"] == 5


def test_urls_that_repeat_in_a_list_without_captions(tmp_path: Path) -> None:
    rows = pd.DataFrame({"url": ["http://h/0", "http://h/1", "http://h/0"]})
    plan = plan_of(rows, tmp_path / "one", caption_column="")
    assert sorted(row["url"] for row in planned(plan)) == ["http://h/0", "http://h/1"]
    assert plan.reasons == {"dropped:duplicate": 1}


def test_a_url_of_two_groups_is_not_joined(tmp_path: Path) -> None:
    rows = pd.DataFrame({"url": ["http://h/0"] * 3, "caption": ["x", "y", "z"], "base": ["a", "b", None]})
    rows["uid"] = ["1", "2", "3"]
    plan = plan_of(rows, tmp_path / "one", group_column="base", uid_column="uid")
    (row,) = planned(plan)
    assert (row["uid"], texts(row), row["group"]) == ("1", ["x", "z"], "a")
    assert plan.reasons == {"dropped:other_group": 1, "joined": 1}


def test_the_order_of_the_list_changes_nothing(tmp_path: Path) -> None:
    rows = pd.concat([pairs(60), pairs(60).assign(caption="again")[::7]])
    one = plan_of(rows, tmp_path / "one", samples_per_shard=7)
    other = plan_of(rows.sample(frac=1, random_state=0), tmp_path / "other", samples_per_shard=7)
    assert one.digest() == other.digest()
    assert [one.part_rows(part) for part in range(one.parts)] == [7] * 8 + [4]
    assert one.part(0).schema == PLAN_SCHEMA
    another = plan_of(rows, tmp_path / "another", samples_per_shard=20)
    assert planned(one) == planned(another)


def test_another_caption_is_another_plan(tmp_path: Path) -> None:
    one = plan_of(pairs(9), tmp_path / "one")
    rows = pairs(9)
    rows.loc[8, "caption"] = "another caption"
    assert plan_of(rows, tmp_path / "other").digest() != one.digest()


def test_batches_end_between_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pd.concat([pairs(50).assign(caption=f"caption {i}") for i in range(5)])
    whole = planned(plan_of(rows, tmp_path / "whole"))
    monkeypatch.setattr("mdc.data.plan.ROWS_AT_ONCE", 3)
    assert planned(plan_of(rows, tmp_path / "small")) == whole
    assert all(len(texts(row)) == 5 for row in whole)


def test_repeated_uids_are_an_error_with_both_places(tmp_path: Path) -> None:
    rows = pairs(4).assign(uid=["a", "b", "a", "c"], caption=["x", "y", " ", "z"])
    with pytest.raises(UserError, match=r"'a' is given twice, at list\.parquet row 1 and at list\.parquet row 3"):
        plan_of(rows, tmp_path / "one", uid_column="uid")


def test_a_list_without_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rows"):
        plan_of(pairs(0).astype(str), tmp_path / "one")
    for name, text in (("a.csv", "url,caption\n"), ("a.jsonl", ""), ("a.tsv", "url\tcaption\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="no rows"):
            write_plan(DownloadParams(input=str(tmp_path / name)), tmp_path / "work")


def test_rows_without_captions_where_none_are_asked_for(tmp_path: Path) -> None:
    plan = plan_of(pairs(3), tmp_path / "one", caption_column="")
    assert [(row["caption"], row["captions"]) for row in planned(plan)] == [(None, [])] * 3


PEAK = """
import resource, sys
from pathlib import Path
from mdc.config import DownloadParams
from mdc.data.plan import write_plan
plan = write_plan(DownloadParams.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
print(plan.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list.parquet", "list.csv"])
def test_a_million_rows_take_less_than_two_gigabytes(tmp_path: Path, name: str) -> None:
    count, path = 1_000_000, tmp_path / name
    generator = np.random.Generator(np.random.PCG64(0))
    urls = [f"https://host{i}.example.org/{i:x}.jpg" for i in generator.integers(0, 10**6, count)]
    table = pa.table({"url": urls, "caption": [f"a picture of thing number {i}" for i in range(count)]})
    pq.write_table(table, path) if name.endswith("parquet") else table.to_pandas().to_csv(path, index=False)
    params = DownloadParams(input=str(path), samples_per_shard=10_000).model_dump_json()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, params, str(tmp_path / "work")], check=True, capture_output=True, text=True
    )
    rows, megabytes = map(int, done.stdout.split())
    assert rows == len(set(urls))
    assert megabytes < 2000
