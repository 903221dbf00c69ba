"""Smaller sets over the same shards, and what is said of a list."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mdc.config import ShardParams
from mdc.data.loader import ShardDataset
from mdc.data.packing import write_shards
from mdc.data.shards import read_index, verify_shards
from mdc.data.stats import read_stats
from mdc.data.subset import write_subset
from mdc.errors import UserError
from mdc.report.data_tables import coverage_table


@pytest.fixture
def folder(shards: Callable[..., Path]) -> Path:
    return shards()


def test_subsets_are_nested_and_those_of_data_share(folder: Path, tmp_path: Path) -> None:
    total = len(ShardDataset(folder, "train"))
    seen: set[str] = set()
    for pairs in (5, 10, 20, total):
        output = tmp_path / f"data-{pairs}" / "shards"
        assert write_subset(folder, pairs, output)["train"] == pairs
        subset = ShardDataset(output, "train")
        assert subset.uids == ShardDataset(folder, "train", share=pairs / total).uids
        assert seen < set(subset.uids)
        seen = set(subset.uids)
        assert not list(output.rglob("*.tar"))
        assert verify_shards(output)["train"] == pairs
        assert read_index(output)["version"] != read_index(folder)["version"]
        assert ShardDataset(output, "test").uids == ShardDataset(folder, "test").uids
        whole = ShardDataset(folder, "train")
        assert subset.images([4]).equal(whole.images([whole.uids.index(subset.uids[4])]))
    write_subset(tmp_path / "data-20" / "shards", 5, tmp_path / "again" / "shards")  # of a subset
    assert (
        ShardDataset(tmp_path / "again" / "shards", "train").uids
        == ShardDataset(tmp_path / "data-5" / "shards", "train").uids
    )


def test_the_order_of_the_shards_does_not_choose(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_shards(ShardParams(samples_per_shard=5, seed=9), tmp_path / "downloaded", tmp_path / "captions", other)
    for source, output in ((folder, tmp_path / "a"), (other, tmp_path / "b")):
        write_subset(source, 7, output)
    assert set(ShardDataset(tmp_path / "a", "train").uids) == set(ShardDataset(tmp_path / "b", "train").uids)


@pytest.mark.parametrize("pairs", [0, 1000])
def test_more_pairs_than_there_are(folder: Path, tmp_path: Path, pairs: int) -> None:
    with pytest.raises(UserError, match=rf"a subset of {pairs} pairs: .* training pairs; give a number up to that"):
        write_subset(folder, pairs, tmp_path / "subset")


def test_a_damaged_shard_is_noticed_through_a_subset(folder: Path, tmp_path: Path) -> None:
    write_subset(folder, 20, tmp_path / "subset")
    (folder / "train-00000.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"train-00000\.tar has 0 bytes"):
        verify_shards(tmp_path / "subset")


def test_statistics_add_up(tmp_path: Path, shards: Callable[..., Path]) -> None:
    captions: list[str | None] = [f"a red dog {i}" for i in range(60)] + [None, " ".join(["dog"] * 60), None]
    status = ["ok"] * 55 + ["failed:http_404"] * 5 + ["ok"] * 2 + ["dropped:missing_caption"]
    urls = [f"http://{'big' if i < 50 else 'small'}.test/{i}.jpg" for i in range(63)]
    sizes = [100] * 31 + [300] * 32
    pictures = [f"picture {max(i, 3)}" for i in range(63)]
    folder = shards(
        captions=captions, status=status, url=urls, sha256=pictures, original_width=sizes, original_height=sizes
    )
    stats = read_stats(tmp_path / "downloaded", tmp_path / "captions", folder)
    assert stats.statuses == {"ok": 57, "failed:http_404": 5, "dropped:missing_caption": 1}
    assert [(host.name, host.listed, host.stored) for host in stats.hosts] == [
        ("big.test", 50, 50),
        ("small.test", 13, 7),
    ]
    assert stats.host_count == 2
    assert stats.sides == {64: 31, 256: 26}
    assert stats.reasons == {"kept": 55, "missing": 2, "too_long": 1}
    assert stats.sources == {"caption": 55}
    assert sum(stats.splits.values()) == 55
    assert stats.tokens == sorted(stats.tokens)
    assert stats.duplicates["top"][0]["rows"] == 4
    assert stats.shards == len(list(folder.glob("*.tar")))
    told = coverage_table(stats)
    assert sum(int(rows.text) for _, rows, _ in told.rows) == 63, "no row is told twice"
    before = read_stats(tmp_path / "downloaded", tmp_path / "none", tmp_path / "none")
    assert (before.statuses, before.reasons, before.shards) == (stats.statuses, {}, 0)
    with pytest.raises(UserError, match="mdc stage download"):
        read_stats(tmp_path / "none", tmp_path / "none", tmp_path / "none")


def test_files_that_are_not_whole_are_named_with_what_makes_them(folder: Path, tmp_path: Path) -> None:
    places = (tmp_path / "downloaded", tmp_path / "captions", folder)
    index, part = folder / "index.json", tmp_path / "captions" / "00000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match=r"captions is damaged: 00000\.parquet has 100 bytes.* `mdc stage caption`"):
        read_stats(*places)
    (tmp_path / "captions" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"captions/manifest\.json is damaged.* `mdc stage caption`"):
        read_stats(*places)
    index.write_text("{")
    with pytest.raises(UserError, match=r"index\.json is damaged .* run `mdc stage shard` again"):
        write_subset(folder, 5, tmp_path / "small")


@pytest.mark.parametrize("place", ["shards", "shards/small", ".", "link"])
def test_a_subset_never_replaces_the_shards(folder: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(UserError, match="give another folder"):
        write_subset(folder, 5, tmp_path / place)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
