import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mdc.errors import UserError
from mdc.eval.index import CosineIndex, measure_recall, normalised
from mdc.files import read_json


@pytest.fixture
def vectors() -> np.ndarray:
    """50 random directions with lengths from 0.1 to 100."""
    random = np.random.default_rng(0)
    return (random.normal(size=(50, 8)) * np.geomspace(0.1, 100, 50)[:, None]).astype(np.float32)


def named(count: int, first: int = 0) -> list[str]:
    return [f"u{number}" for number in range(first, first + count)]


def built(vectors: np.ndarray, model: str = "m", flat_below: int = 20_000) -> CosineIndex:
    return CosineIndex.build(named(len(vectors)), vectors, model, flat_below)


def rows(uids: np.ndarray) -> np.ndarray:
    """The numbers in names that `named` gave."""
    return np.vectorize(lambda uid: int(uid[1:]))(uids)


def clustered(count: int) -> np.ndarray:
    random = np.random.default_rng(2)
    return random.normal(size=(64, 16))[random.integers(64, size=count)] + 0.3 * random.normal(size=(count, 16))


def test_every_vector_finds_itself_whatever_its_length(vectors: np.ndarray) -> None:
    similarity, found = built(vectors).search(vectors * 7, 1, "m")
    assert found[:, 0].tolist() == named(50)
    np.testing.assert_allclose(similarity, 1, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(np.float16),
        lambda x: x.astype(np.float64),
        lambda x: np.asfortranarray(x),
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: x.astype(np.float64) * 1e200,
    ],
    ids=["float16", "float64", "fortran", "strided", "huge"],
)
def test_any_layout_gives_the_same_neighbours(vectors: np.ndarray, change) -> None:
    expected = built(vectors).search(vectors, 3, "m")[1]
    changed = change(vectors)
    np.testing.assert_array_equal(built(changed).search(changed, 3, "m")[1], expected)


def test_agrees_with_numpy(vectors: np.ndarray) -> None:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = unit[:5] @ unit.T
    similarity, found = built(vectors).search(vectors[:5], 4, "m")
    np.testing.assert_array_equal(rows(found), np.argsort(-cosine, axis=1)[:, :4])
    np.testing.assert_allclose(similarity, -np.sort(-cosine, axis=1)[:, :4], atol=5e-4)


def test_another_dimension_is_refused_with_both_and_both_models(vectors: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"6 dimensions \(model other\), the index 8 \(model mine\)"):
        built(vectors, "mine").search(vectors[:, :6], 1, "other")


def test_another_model_of_the_same_dimension_is_refused(vectors: np.ndarray, tmp_path) -> None:
    built(vectors, "mine").save(tmp_path / "index")
    with pytest.raises(UserError, match="model other, the index holds features of model mine"):
        CosineIndex.load(tmp_path / "index").search(vectors, 1, "other")


def test_bad_queries_are_refused(vectors: np.ndarray) -> None:
    index = built(vectors)
    broken = vectors.copy()
    broken[[3, 7], 2] = np.nan, np.inf
    for query, k, message in (
        (vectors[0], 1, r"shape \[rows, dimension\], got \[8\]"),
        (broken, 1, "non-finite numbers in rows 3, 7"),
        (np.zeros((2, 8)), 1, "all zero in rows 0, 1"),
        (np.full((1, 8), "a"), 1, "real numbers"),
        (vectors, 0, "k must be at least 1, got 0"),
    ):
        with pytest.raises(UserError, match=message):
            index.search(query, k, "m")


def test_more_neighbours_than_vectors_are_all_of_them(vectors: np.ndarray) -> None:
    found = built(vectors[:4]).search(vectors[:2], 10, "m")[1]
    np.testing.assert_array_equal(np.sort(rows(found), axis=1), [[0, 1, 2, 3]] * 2)


def test_an_empty_index_says_so() -> None:
    with pytest.raises(UserError, match="index is empty"):
        built(np.zeros((0, 8))).search(np.ones((1, 8)), 1, "m")


@pytest.mark.parametrize("count", [10, 50])
def test_lists_on_a_small_set_never_give_a_missing_row(count: int) -> None:
    vectors = np.random.default_rng(1).normal(size=(count, 8))
    found = built(vectors, flat_below=0).search(vectors, 10, "m")[1]
    assert all(len(set(row)) == 10 for row in found)
    assert set(found.ravel()) <= set(named(count))


def test_lists_with_too_few_vectors_are_searched_exactly() -> None:
    vectors = clustered(4000)
    index = built(vectors, flat_below=1000)
    assert 0 < index.facts.probes < index.facts.lists
    similarity, found = index.search(vectors[:20], 1000, "m")  # more than the visited lists hold
    assert all(len(set(row)) == 1000 for row in found)
    np.testing.assert_allclose(similarity, built(vectors).search(vectors[:20], 1000, "m")[0], atol=1e-5)


def test_lists_reach_the_wanted_recall_without_visiting_all() -> None:
    vectors = clustered(6000)
    index = built(vectors, flat_below=1000)
    assert 0 < index.facts.probes < index.facts.lists
    assert 0.95 <= measure_recall(index) == index.facts.recall_at_10 <= 1
    exact, found = (each.search(vectors[:200], 10, "m")[1] for each in (built(vectors), index))
    overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact, found, strict=True)])
    assert overlap > 0.9


def test_recall_of_exact_search_is_one_even_with_equal_vectors() -> None:
    vectors = np.repeat(np.random.default_rng(3).normal(size=(30, 4)), 3, axis=0)
    assert measure_recall(built(vectors)) == 1


@pytest.mark.parametrize("flat_below", [0, 20_000], ids=["lists", "flat"])
def test_adding_and_removing_is_building_anew(flat_below: int) -> None:
    vectors = clustered(3000)
    index = built(vectors[:2000], flat_below=flat_below)
    index = index.add(named(1000, 2000), vectors[2000:], "m", flat_below)
    index = index.remove(named(500, 1000)).remove(["u0"])
    kept = np.r_[1:1000, 1500:3000]
    assert index.uids == [f"u{row}" for row in kept]
    assert "u1200" not in index
    assert len(index) == index.facts.count == 2499
    similarity, found = index.search(vectors[kept], 1, "m")
    assert found[:, 0].tolist() == index.uids
    np.testing.assert_allclose(similarity, 1, atol=1e-5)
    assert not set(index.search(vectors[1000:1500], 5, "m")[1].ravel()) & set(named(500, 1000))
    assert measure_recall(index) >= 0.95
    back = index.add(named(1, 1000), vectors[1000:1001], "m", flat_below)
    assert back.search(vectors[1000:1001], 1, "m")[1][0, 0] == "u1000"


def test_an_index_that_outgrows_its_kind_is_made_anew() -> None:
    vectors = clustered(5000)
    index = built(vectors[:900], flat_below=1000)
    assert index.facts.lists == 0
    index = index.add(named(1100, 900), vectors[900:2000], "m", flat_below=1000)
    assert index.facts.lists > 0
    assert index.facts.made_for == 2000
    assert index.add(named(1000, 2000), vectors[2000:3000], "m", 1000).facts.made_for == 2000
    assert index.add(named(3000, 2000), vectors[2000:], "m", 1000).facts.made_for == 5000


def test_uids_are_checked(vectors: np.ndarray) -> None:
    index = built(vectors)
    with pytest.raises(UserError, match="'a' is given twice"):
        CosineIndex.build(["b", "a", "a"], vectors[:3], "m")
    with pytest.raises(UserError, match="2 uids for 3 vectors"):
        CosineIndex.build(["b", "a"], vectors[:3], "m")
    with pytest.raises(UserError, match="holds 'u7' already"):
        index.add(["new", "u7"], vectors[:2], "m")
    with pytest.raises(UserError, match="does not hold 'u50'; nothing was removed"):
        index.remove(["u1", "u50"])
    with pytest.raises(UserError, match="vectors come from model other, the index holds features of model m"):
        index.add(["new"], vectors[:1], "other")
    assert index.uids == named(50)


@pytest.mark.parametrize("flat_below", [0, 20_000], ids=["lists", "flat"])
def test_save_and_load(vectors: np.ndarray, tmp_path: Path, flat_below: int) -> None:
    index = built(vectors, flat_below=flat_below).remove(["u3"])
    index.save(tmp_path / "index")
    loaded = CosineIndex.load(tmp_path / "index")
    assert loaded.facts == index.facts
    for a, b in zip(loaded.search(vectors, 5, "m"), index.search(vectors, 5, "m"), strict=True):
        np.testing.assert_array_equal(a, b)
    assert loaded.add(["u3"], vectors[3:4], "m").search(vectors[3:4], 1, "m")[1][0, 0] == "u3"


def test_equal_sets_have_equal_versions_and_old_ones_go(vectors: np.ndarray, tmp_path: Path) -> None:
    index = built(vectors)
    versions = [each.save(tmp_path) for each in (index, index, index.remove(["u1"]), index.remove(["u2"]))]
    assert versions[0] == versions[1] != versions[2] != versions[3]
    assert read_json(tmp_path / "current.json") == {"version": versions[3], "before": versions[2]}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == set(versions[2:])


def test_a_reader_never_sees_half_a_set(tmp_path: Path) -> None:
    """While sets are replaced again and again, every load is one of them, whole."""
    sets = [built(clustered(60 + i)) for i in range(6)]
    sets[0].save(tmp_path)
    stop, seen, failed = threading.Event(), set[int](), list[Exception]()

    def read() -> None:
        while not stop.is_set():
            try:
                index = CosineIndex.load(tmp_path)
                assert index.search(clustered(1), 1, "m")[1][0, 0] in index
                seen.add(len(index))
            except Exception as error:
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for index in sets * 3:
        index.save(tmp_path)
    stop.set()
    reader.join()
    assert not failed
    assert seen <= {len(index) for index in sets}


def harmed(folder: Path, how: str, other: Sequence[Path]) -> None:
    at = folder / read_json(folder / "current.json")["version"]
    if how == "missing":
        (at / "ids.parquet").unlink()
    elif how == "cut":
        (at / "index.faiss").write_bytes((at / "index.faiss").read_bytes()[:-8])
    else:
        shutil.copy(other[0] / "ids.parquet", at / "ids.parquet")


@pytest.mark.parametrize("how", ["missing", "cut", "foreign"])
def test_files_that_do_not_belong_together_are_refused(vectors: np.ndarray, tmp_path: Path, how: str) -> None:
    path = tmp_path / "index"
    with pytest.raises(UserError, match=re.escape(str(path))):
        CosineIndex.load(path)
    built(vectors).save(path)
    other = tmp_path / "other" / built(vectors[:9]).save(tmp_path / "other")
    harmed(path, how, [other])
    with pytest.raises(UserError, match="is damaged"):
        CosineIndex.load(path)


def test_normalised_rows_have_length_one(vectors: np.ndarray) -> None:
    unit = normalised(vectors)
    assert unit.dtype == np.float32
    assert unit.flags.c_contiguous
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
