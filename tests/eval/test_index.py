import re

import numpy as np
import pytest

from mdc.errors import UserError
from mdc.eval.index import CosineIndex, measure_recall, normalised


@pytest.fixture
def vectors() -> np.ndarray:
    """50 random directions with lengths from 0.1 to 100."""
    random = np.random.default_rng(0)
    return (random.normal(size=(50, 8)) * np.geomspace(0.1, 100, 50)[:, None]).astype(np.float32)


def test_every_vector_finds_itself_whatever_its_length(vectors: np.ndarray) -> None:
    similarity, rows = CosineIndex.build(vectors, "m").search(vectors * 7, 1, "m")
    np.testing.assert_array_equal(rows[:, 0], np.arange(50))
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
    expected = CosineIndex.build(vectors, "m").search(vectors, 3, "m")[1]
    changed = change(vectors)
    np.testing.assert_array_equal(CosineIndex.build(changed, "m").search(changed, 3, "m")[1], expected)


def test_agrees_with_numpy(vectors: np.ndarray) -> None:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = unit[:5] @ unit.T
    similarity, rows = CosineIndex.build(vectors, "m").search(vectors[:5], 4, "m")
    np.testing.assert_array_equal(rows, np.argsort(-cosine, axis=1)[:, :4])
    np.testing.assert_allclose(similarity, -np.sort(-cosine, axis=1)[:, :4], atol=1e-6)


def test_another_dimension_is_refused_with_both_and_both_models(vectors: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"6 dimensions \(model other\), the index 8 \(model mine\)"):
        CosineIndex.build(vectors, "mine").search(vectors[:, :6], 1, "other")


def test_another_model_of_the_same_dimension_is_refused(vectors: np.ndarray, tmp_path) -> None:
    CosineIndex.build(vectors, "mine").save(tmp_path / "index.faiss")
    with pytest.raises(UserError, match="model other, the index holds features of model mine"):
        CosineIndex.load(tmp_path / "index.faiss").search(vectors, 1, "other")


def test_bad_queries_are_refused(vectors: np.ndarray) -> None:
    index = CosineIndex.build(vectors, "m")
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
    rows = CosineIndex.build(vectors[:4], "m").search(vectors[:2], 10, "m")[1]
    np.testing.assert_array_equal(np.sort(rows, axis=1), [[0, 1, 2, 3]] * 2)


def test_an_empty_index_says_so() -> None:
    with pytest.raises(UserError, match="index is empty"):
        CosineIndex.build(np.zeros((0, 8)), "m").search(np.ones((1, 8)), 1, "m")


@pytest.mark.parametrize("count", [10, 50])
def test_lists_on_a_small_set_never_give_a_missing_row(count: int) -> None:
    vectors = np.random.default_rng(1).normal(size=(count, 8))
    index = CosineIndex.build(vectors, "m", flat_below=0)
    rows = index.search(vectors, 10, "m")[1]
    assert rows.min() >= 0
    assert all(len(set(row)) == 10 for row in rows)


def test_lists_reach_the_wanted_recall_without_visiting_all() -> None:
    random = np.random.default_rng(2)
    vectors = random.normal(size=(64, 16))[random.integers(64, size=6000)] + 0.3 * random.normal(size=(6000, 16))
    index = CosineIndex.build(vectors, "m", flat_below=1000)
    assert 0 < index.facts.probes < index.facts.lists
    assert 0.95 <= measure_recall(index, vectors) <= 1
    _, exact = CosineIndex.build(vectors, "m").search(vectors[:200], 10, "m")
    _, found = index.search(vectors[:200], 10, "m")
    overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact, found, strict=True)])
    assert overlap > 0.9


def test_recall_of_exact_search_is_one_even_with_equal_vectors() -> None:
    vectors = np.repeat(np.random.default_rng(3).normal(size=(30, 4)), 3, axis=0)
    assert measure_recall(CosineIndex.build(vectors, "m"), vectors) == 1


def test_save_and_load(vectors: np.ndarray, tmp_path) -> None:
    index = CosineIndex.build(vectors, "m", flat_below=0)
    index.save(tmp_path / "index.faiss")
    loaded = CosineIndex.load(tmp_path / "index.faiss")
    assert loaded.facts == index.facts
    for a, b in zip(loaded.search(vectors, 5, "m"), index.search(vectors, 5, "m"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_files_that_do_not_belong_together_are_refused(vectors: np.ndarray, tmp_path) -> None:
    path = tmp_path / "index.faiss"
    with pytest.raises(UserError, match=re.escape(str(path))):
        CosineIndex.load(path)
    CosineIndex.build(vectors, "m").save(path)
    CosineIndex.build(vectors[:9], "m").save(tmp_path / "other.faiss")
    (tmp_path / "other.json").replace(tmp_path / "index.json")
    with pytest.raises(UserError, match=r"50 vectors of 8 dimensions, index\.json says 9 of 8"):
        CosineIndex.load(path)


def test_normalised_rows_have_length_one(vectors: np.ndarray) -> None:
    unit = normalised(vectors)
    assert unit.dtype == np.float32
    assert unit.flags.c_contiguous
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
