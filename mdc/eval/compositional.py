"""Does the model tell a caption from a foil that differs in one word? Rules make foils from the captions themselves.

A rule swaps one of a group of words, such as one skin tone for another, wherever it stands as a whole word; the outcome
is a foil only if it is itself a caption of the data, belongs to a picture that looks different, and is not the caption.

A text model prefers sentences that it was trained on, picture or no picture. So a pair is *fair* if it was trained on
both captions or on neither, and only fair pairs make up the headline figure. Pairs whose foil was trained on while the
caption was not are scored as well, in rows of their own: there the words alone speak against the caption, and only the
difference to the blind score says something. The other way round, pairs would flatter the model, and are left out.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mdc.draws import derive_seed
from mdc.errors import UserError

ALL = "all"  # the name of the row over all fair pairs
TRAINED = " (foil trained on)"  # ends the name of a row whose pairs are not fair

Scorer = Callable[[Sequence[tuple[str, list[str]]]], dict[tuple[str, str], tuple[float, float]]]


@dataclass(frozen=True)
class Sample:
    """A picture with its caption. picture: a hash of its pixels. trained: it lies in the training split."""

    uid: str
    caption: str
    picture: str
    trained: bool
    evaluated: bool  # it lies in the split that pairs are made for


@dataclass(frozen=True)
class Pair:
    """A picture, its caption, and a caption that is wrong for it."""

    uid: str
    caption: str
    foil: str
    rule: str
    fair: bool

    @property
    def row(self) -> str:
        """The name of the row of results that it counts in."""
        return self.rule if self.fair else self.rule + TRAINED


@dataclass(frozen=True)
class PairCounts:
    """Candidates that became no pair, by reason."""

    same_picture: int  # the foil belongs to a picture that looks the same
    flattering: int  # trained on the caption and not on the foil
    above_limit: int  # beyond max_pairs of a row


def plain(caption: str) -> str:
    """The form in which captions are compared: case, spacing and the shape of an apostrophe do not count."""
    return " ".join(caption.split()).casefold().replace("’", "'")


def swapped(caption: str, groups: Sequence[Sequence[str]]) -> Iterator[str]:
    """Every caption that differs from `caption` in one of the groups' words, in `plain` form.

    Words are whole: a letter, digit, hyphen or apostrophe beside one makes it part of another. Where several fit, the
    longest is meant, so "light" in "medium-light" is none and "light blue" is not "blue".
    """
    text = plain(caption)
    for group in groups:
        words = [plain(word) for word in group]
        longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        for match in re.finditer(rf"(?<![\w'-])(?:{longest_first})(?![\w'-])", text):
            yield from (text[: match.start()] + word + text[match.end() :] for word in words if word != match.group())


def make_pairs(
    samples: Iterable[Sample], rules: Mapping[str, Sequence[Sequence[str]]], limit: int, seed: int
) -> tuple[list[Pair], PairCounts]:
    """The pairs of all evaluated samples, sorted by rule, uid and foil; each (picture, foil) once, by the first rule.

    limit: pairs per row of results, drawn by seed. Two captions that are each other's foils are drawn together, so
    that a scorer that never looks at the picture is right about one and wrong about the other.
    """
    samples = sorted(samples, key=lambda sample: sample.uid)
    spelt = {plain(sample.caption): sample.caption for sample in reversed(samples)}
    trained = {plain(sample.caption) for sample in samples if sample.trained}
    pictures: dict[str, set[str]] = {}
    for sample in samples:
        pictures.setdefault(plain(sample.caption), set()).add(sample.picture)

    rows: dict[str, list[Pair]] = {}
    seen: set[tuple[str, str]] = set()
    same_picture = flattering = 0
    for rule, groups in rules.items():
        for sample in (sample for sample in samples if sample.evaluated):
            own = plain(sample.caption)
            for foil in sorted(set(swapped(sample.caption, groups)) & spelt.keys() - {own}):
                if (sample.uid, foil) in seen:
                    continue
                seen.add((sample.uid, foil))
                if sample.picture in pictures[foil]:
                    same_picture += 1
                elif own in trained and foil not in trained:
                    flattering += 1
                else:
                    fair = (own in trained) == (foil in trained)
                    pair = Pair(sample.uid, sample.caption, spelt[foil], rule, fair)
                    rows.setdefault(pair.row, []).append(pair)
    kept = [pair for row in rows.values() for pair in _draw(row, limit, seed)]
    above_limit = sum(map(len, rows.values())) - len(kept)
    kept.sort(key=lambda pair: (list(rules).index(pair.rule), not pair.fair, pair.uid, pair.foil))
    return kept, PairCounts(same_picture, flattering, above_limit)


def _draw(pairs: list[Pair], limit: int, seed: int) -> list[Pair]:
    """At most `limit` pairs; all pairs of the same two captions, or none of them."""

    def place(pair: Pair) -> tuple[int, list[str]]:
        both = sorted((plain(pair.caption), plain(pair.foil)))
        return derive_seed(seed, "pairs", *both), both

    drawn: list[Pair] = []
    for _, together in groupby(sorted(pairs, key=place), key=place):
        couple = list(together)
        if len(drawn) + len(couple) <= limit:
            drawn += couple
    return drawn


@dataclass(frozen=True)
class Verdict:
    """How often the caption outscores its foil. accuracy: a tie counts half."""

    accuracy: float
    ties: int


def judge(caption_scores: np.ndarray, foil_scores: np.ndarray) -> Verdict:
    """Compare score by score, `[N]` each. A constant scorer gets 0.5; swapped sides get the complement."""
    caption_scores, foil_scores = np.asarray(caption_scores), np.asarray(foil_scores)
    for scores in (caption_scores, foil_scores):
        if np.isnan(scores).any():
            raise UserError(f"pair {int(np.isnan(scores).argmax())} has a score that is not a number")
    ties = int((caption_scores == foil_scores).sum())
    wins = int((caption_scores > foil_scores).sum())
    return Verdict((wins + 0.5 * ties) / len(caption_scores), ties)
