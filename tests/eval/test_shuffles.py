from collections import Counter

import pytest

from mdc.eval.shuffles import SHUFFLES, cleaned, is_content, shuffled

CAPTION = "A small brown dog is sitting on the red sofa next to two sleeping cats"


def test_cleaning_is_the_authors() -> None:
    assert cleaned('A  "Dog" (big): runs; fast!\n') == "a dog big runs fast"
    assert cleaned("word " * 40) == " ".join(["word"] * 30)


def test_a_shuffle_keeps_the_words_and_changes_their_order() -> None:
    foils = shuffled(CAPTION, seed=0)
    assert set(foils) == set(SHUFFLES)
    for foil in foils.values():
        assert Counter(foil.split()) == Counter(cleaned(CAPTION).split())
        assert foil != cleaned(CAPTION)


def test_each_way_moves_what_it_says() -> None:
    words = cleaned(CAPTION).split()
    foils = {name: foil.split() for name, foil in shuffled(CAPTION, seed=3).items()}
    for old, new in zip(words, foils["content_words"], strict=True):
        assert is_content(old) or old == new
    for old, new in zip(words, foils["all_but_content_words"], strict=True):
        assert old == new or not is_content(old)
    threes = [sorted(words[i : i + 3]) for i in range(0, len(words), 3)]
    assert [sorted(foils["within_trigrams"][i : i + 3]) for i in range(0, len(words), 3)] == threes
    text = " " + " ".join(foils["trigrams"]) + " "
    assert all(f" {' '.join(words[i : i + 3])} " in text for i in range(0, len(words), 3))


def test_shuffles_are_functions_of_seed_and_caption() -> None:
    assert shuffled(CAPTION, seed=0) == shuffled(CAPTION + " .", seed=0)
    assert shuffled(CAPTION, seed=0) != shuffled(CAPTION, seed=1)


@pytest.mark.parametrize("caption", ["dog", "the the", "Dog dog!", ""])
def test_a_caption_without_another_order_has_no_foil(caption: str) -> None:
    assert shuffled(caption, seed=0) == {}


def test_three_words_are_one_trigram() -> None:
    foils = shuffled("red dog house", seed=0)
    assert "trigrams" not in foils
    assert "all_but_content_words" not in foils
    assert all(foil != "red dog house" for foil in foils.values())
