import numpy as np
import pytest

from mdc.errors import UserError
from mdc.eval.compositional import Pair, Sample, judge, make_pairs, swapped

TONES = [["light skin tone", "medium-light skin tone", "dark skin tone"]]
COLOURS = [["red", "blue", "light blue"]]


def sample(uid: str, caption: str, picture: str = "", trained: bool = False, evaluated: bool = True) -> Sample:
    return Sample(uid, caption, picture or uid, trained, evaluated)


def made(samples: list[Sample], rules=None, limit: int = 100, seed: int = 0):
    return make_pairs(samples, rules or {"colour": COLOURS}, limit, seed)


@pytest.mark.parametrize(
    ("caption", "groups", "expected"),
    [
        ("wave medium-light skin tone", TONES, {"wave light skin tone", "wave dark skin tone"}),
        ("light blue heart", COLOURS, {"red heart", "blue heart"}),
        ("A Red car, a red door", COLOURS, {f"a {c} car, a red door" for c in ("blue", "light blue")}
         | {f"a red car, a {c} door" for c in ("blue", "light blue")}),
        ("reddish, blue-green, infra-red and o’red", COLOURS, set()),
        ("(red) heart", COLOURS, {"(blue) heart", "(light blue) heart"}),
        ("two o’clock", [["one o'clock", "two o'clock"]], {"one o'clock"}),
        ("nothing to swap", COLOURS, set()),
    ],
)  # fmt: skip
def test_whole_and_longest_words_are_swapped(caption: str, groups: list[list[str]], expected: set[str]) -> None:
    assert set(swapped(caption, groups)) == expected


def test_a_foil_is_a_caption_of_the_data_and_never_the_caption() -> None:
    pairs, _ = made([sample("1", "red heart"), sample("2", "Blue  Heart"), sample("3", "red car"), sample("4", "bus")])
    assert pairs == [
        Pair("1", "red heart", "Blue  Heart", "colour", fair=True),
        Pair("2", "Blue  Heart", "red heart", "colour", fair=True),
    ]


def test_each_picture_and_foil_is_counted_once_by_the_first_rule() -> None:
    rules = {"first": COLOURS, "second": [["red", "blue"], ["red", "blue", "green"]]}
    pairs, _ = made([sample("1", "red heart"), sample("2", "blue heart"), sample("3", "green heart")], rules)
    assert [(p.uid, p.foil, p.rule) for p in pairs] == [
        ("1", "blue heart", "first"),
        ("2", "red heart", "first"),
        ("1", "green heart", "second"),
        ("2", "green heart", "second"),
        ("3", "blue heart", "second"),
        ("3", "red heart", "second"),
    ]


def test_a_foil_whose_picture_looks_the_same_is_none() -> None:
    pairs, counts = made([sample("1", "red heart", "same"), sample("2", "blue heart", "same")])
    assert pairs == []
    assert counts.same_picture == 2


def test_only_pairs_with_two_trained_captions_or_none_are_fair() -> None:
    pairs, counts = made(
        [
            sample("1", "red heart"),
            sample("2", "blue heart", trained=True, evaluated=False),
            sample("3", "light blue heart", evaluated=False),
        ]
    )
    assert [(p.foil, p.row) for p in pairs] == [
        ("light blue heart", "colour"),
        ("blue heart", "colour (foil trained on)"),
    ]
    assert counts.flattering == 0


def test_pairs_that_flatter_the_model_are_left_out() -> None:
    samples = [
        sample("1", "red heart"),
        sample("2", "red heart", trained=True, evaluated=False),
        sample("3", "blue heart", evaluated=False),
    ]
    pairs, counts = made(samples)
    assert pairs == []
    assert counts.flattering == 1


def test_pairs_do_not_depend_on_the_order_of_the_samples() -> None:
    samples = [sample(str(i), f"{c} {t}") for i, (c, t) in enumerate((c, t) for c in COLOURS[0] for t in "abcdefgh")]
    first, counts = made(samples, limit=10)
    assert made(samples[::-1], limit=10) == (first, counts)
    assert made(samples, limit=10, seed=1)[0] != first
    assert counts.above_limit == len(made(samples)[0]) - len(first)


def test_the_limit_keeps_both_directions_of_a_pair() -> None:
    samples = [sample(str(i), f"{c} {t}") for i, (c, t) in enumerate((c, t) for c in COLOURS[0] for t in "abcdefgh")]
    pairs, _ = made(samples, limit=11)
    assert len(pairs) == 10
    both = {(p.caption, p.foil) for p in pairs}
    assert both == {(foil, caption) for caption, foil in both}


def test_a_constant_scorer_gets_exactly_chance() -> None:
    verdict = judge(np.zeros(7), np.zeros(7))
    assert (verdict.accuracy, verdict.ties) == (0.5, 7)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_swapping_the_sides_gives_the_complement(dtype: type) -> None:
    random = np.random.default_rng(0)
    one, other = random.integers(4, size=(2, 101)).astype(dtype)
    there, back = judge(one, other), judge(other, one)
    assert there.ties == back.ties > 0
    assert there.accuracy + back.accuracy == pytest.approx(1)
    assert there.accuracy == pytest.approx(((one > other).sum() + there.ties / 2) / 101)


def test_a_score_that_is_no_number_is_an_error() -> None:
    with pytest.raises(UserError, match="question 1 has a score that is not a number"):
        judge(np.array([1.0, np.nan]), np.array([0.0, 0.0]))
