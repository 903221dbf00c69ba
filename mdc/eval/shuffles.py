"""Captions with their words in another order: the foils of COCO-Order and Flickr30k-Order (ARO, arXiv 2210.01936).

The authors publish the four ways of shuffling and draw anew in every run; here a shuffle is a function of the seed and
the caption, and can be stored. Two more things differ, since they need neither a tagger nor its data: words are those
between spaces after the caption was cleaned (theirs: tokens of the raw caption, cleaned afterwards), and in place of
"nouns and adjectives" stand content words, that is all but the function words of English. So verbs are shuffled with
the nouns, and nouns and adjectives in one pool. A stored file of other shuffles is read as well.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from mdc.draws import derive_seed

MAX_WORDS = 30  # of a cleaned caption, as the authors have it
TRIES = 20  # at an order that differs

Words = list[str]


def cleaned(caption: str, max_words: int = MAX_WORDS) -> str:
    """Lower case, without . ! " ( ) * # : ; ~ and cut after `max_words`: as in the authors' evaluation."""
    return " ".join(re.sub(r"[.!\"()*#:;~]", " ", caption.lower()).split()[:max_words])


def is_content(word: str) -> bool:
    """Whether the word is not one of scikit-learn's English stop words."""
    return word.strip("'\"-,?") not in ENGLISH_STOP_WORDS


def _within(words: Words, places: Sequence[int], random: np.random.Generator) -> Words:
    """The words with those at `places` in random order."""
    moved = list(words)
    for place, source in zip(places, random.permutation(places), strict=True):
        moved[place] = words[source]
    return moved


def content_words(words: Words, random: np.random.Generator) -> Words:
    return _within(words, [i for i, word in enumerate(words) if is_content(word)], random)


def all_but_content_words(words: Words, random: np.random.Generator) -> Words:
    return _within(words, [i for i, word in enumerate(words) if not is_content(word)], random)


def within_trigrams(words: Words, random: np.random.Generator) -> Words:
    """Each three words among themselves."""
    for start in range(0, len(words), 3):
        words = _within(words, range(start, min(start + 3, len(words))), random)
    return words


def trigrams(words: Words, random: np.random.Generator) -> Words:
    """Threes of words as wholes."""
    threes = [words[i : i + 3] for i in range(0, len(words), 3)]
    return [word for three in random.permutation(len(threes)) for word in threes[three]]


SHUFFLES: dict[str, Callable[[Words, np.random.Generator], Words]] = {
    "content_words": content_words,
    "all_but_content_words": all_but_content_words,
    "within_trigrams": within_trigrams,
    "trigrams": trigrams,
}


def shuffled(caption: str, seed: int) -> dict[str, str]:
    """The cleaned caption's words in another order, by way of shuffling.

    A way that cannot change the order is left out: of one word, of equal words, or of three words as one trigram.
    """
    words = cleaned(caption).split()
    foils = {}
    for name, shuffle in SHUFFLES.items():
        random = np.random.default_rng(derive_seed(seed, "shuffle", name, " ".join(words)))
        tries = (shuffle(words, random) for _ in range(TRIES))
        other = next((tried for tried in tries if tried != words), None)
        if other is not None:
            foils[name] = " ".join(other)
    return foils
