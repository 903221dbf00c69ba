import numpy as np
import pytest

from mdc.errors import UserError
from mdc.eval.choice import by_row, credit, macro, share


@pytest.mark.parametrize("foils", [1, 2, 4])
def test_a_constant_scorer_gets_exactly_chance(foils: int) -> None:
    worth, tied = credit(np.zeros(7), np.zeros((7, foils)))
    assert worth.mean() == pytest.approx(1 / (1 + foils), abs=1e-15)
    assert tied.all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_where_the_right_caption_stands_changes_nothing(dtype: type) -> None:
    scores = np.random.default_rng(0).integers(4, size=(50, 5)).astype(dtype)
    for right in range(5):
        moved = np.roll(scores, right, axis=1)  # the right caption is now candidate number `right`
        worth, tied = credit(moved[:, right], [np.delete(row, right) for row in moved])
        first, first_tied = credit(scores[:, 0], list(scores[:, 1:]))
        np.testing.assert_array_equal(worth, first)
        np.testing.assert_array_equal(tied, first_tied)


def test_all_candidates_together_get_one() -> None:
    """Whichever is taken for right: the credits of a question's candidates sum to 1, ties or not."""
    scores = np.random.default_rng(1).integers(3, size=(40, 4)).astype(float)
    total = sum(credit(scores[:, i], [np.delete(row, i) for row in scores])[0] for i in range(4))
    np.testing.assert_allclose(total, 1)


def test_a_tie_below_the_top_is_simply_wrong() -> None:
    worth, tied = credit(np.array([1.0, 3.0]), [np.array([1.0, 2.0]), np.array([2.0, 2.0])])
    assert worth.tolist() == [0, 1]
    assert not tied.any()


@pytest.mark.parametrize("where", ["caption", "foil"])
def test_a_score_that_is_no_number_is_an_error(where: str) -> None:
    caption, foil = np.array([1.0, 1.0]), np.array([[0.0], [0.0]])
    (caption if where == "caption" else foil)[1] = np.nan
    with pytest.raises(UserError, match="question 1 has a score that is not a number"):
        credit(caption, foil)


def test_standard_error_of_single_pictures_is_the_binomials() -> None:
    worth = np.array([1.0] * 30 + [0.0] * 10)
    found = share(worth, np.zeros(40, dtype=bool), range(40))
    assert found.value == 0.75
    assert found.stderr == pytest.approx(np.std(worth, ddof=1) / np.sqrt(40))


def test_questions_of_one_picture_are_not_independent() -> None:
    worth = np.repeat([1.0, 0.0, 1.0, 1.0], 25)
    alone = share(worth, np.zeros(100, dtype=bool), range(100)).stderr
    together = share(worth, np.zeros(100, dtype=bool), np.repeat(range(4), 25).tolist()).stderr
    assert together == pytest.approx(np.std([1, 0, 1, 1], ddof=1) / 2)
    assert together > 4 * alone


def test_macro_and_micro_of_unequal_rows() -> None:
    rows = ["on"] * 100 + ["riding"]
    worth = np.array([1.0] * 90 + [0.0] * 10 + [0.0])
    assert macro(worth, rows) == pytest.approx((0.9 + 0) / 2)
    assert macro(worth, rows, at_least=25) == pytest.approx(0.9)
    assert macro(worth, rows, at_least=200) is None
    assert worth.mean() == pytest.approx(90 / 101)
    assert by_row(worth, rows) == {"on": (pytest.approx(0.9), 100), "riding": (0, 1)}
