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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdc.draws import derive_seed
from mdc.eval.choice import credit
from mdc.eval.scored import Subject, score_texts
from mdc.objectives.scoring import Scores, Seeds, default_scorer, score
from mdc.train.checkpoint import LoadedModel

ALL = "all"  # the name of the row over all fair pairs
TRAINED = " (foil trained on)"  # ends the name of a row whose pairs are not fair

Patches = Callable[[Sequence[str]], Tensor]  # uids -> patches_MPD


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
    """The pairs of all evaluated samples, fair ones first; each (picture, foil) once, by the first rule that makes it.

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
    order = {rule: place for place, rule in enumerate(rules)}
    kept.sort(key=lambda pair: (not pair.fair, order[pair.rule], pair.uid, pair.foil))
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
    worth, tied = credit(np.asarray(caption_scores), np.asarray(foil_scores)[:, None])
    return Verdict(float(worth.mean()), int(tied.sum()))


@dataclass(frozen=True)
class PairScores:
    """Of N pairs, `[N]` each: larger means that the caption fits better. Blind: without the picture."""

    caption: np.ndarray
    foil: np.ndarray
    stderr: np.ndarray  # of caption minus foil, as if the two were independent; they share their draws, so it is less
    blind_caption: np.ndarray
    blind_foil: np.ndarray


@dataclass(frozen=True)
class Tokenised:
    """A model that reads captions as the tokens they were stored with; see `mdc.eval.scored.Subject`."""

    loaded: LoadedModel
    tokens: Mapping[str, Sequence[int]]

    @property
    def scorers(self) -> Sequence[str]:
        return [default_scorer(self.loaded.config.pretrain.objective)]

    def too_long(self, captions: Sequence[str]) -> list[bool]:
        return [len(self.tokens[text]) > self.loaded.config.max_tokens for text in captions]

    def score_seen(
        self, seen_MPD: Tensor, captions: Sequence[Sequence[str]], scorer: str, seeds: Seeds, draws: int
    ) -> Scores:
        ids = [[self.tokens[text] for text in row] for row in captions]
        longest, pad_id = max(len(each) for row in ids for each in row), self.loaded.config.vocabulary.pad_id
        tokens_MKL = torch.tensor([[[*each, *[pad_id] * (longest - len(each))] for each in row] for row in ids])
        return score(self.loaded.model, self.loaded.config, seen_MPD, tokens_MKL, scorer, seeds, draws)


def score_pairs(
    pairs: Sequence[Pair],
    subject: Subject,
    patches: Patches,
    mean_patches_PD: Tensor,
    scorer: str,
    draws: int,
    seed: int,
    on_scored: Callable[[int], object] = lambda count: None,
) -> PairScores:
    """Score both captions of every pair, with the picture and with the mean patch features in its place.

    A pair and its mirror image cannot both be won blind. on_scored: told how many captions were scored, each once per
    picture and once blind.
    """
    captions: dict[str, dict[str, None]] = {}
    for pair in pairs:
        captions.setdefault(pair.uid, {}).update(dict.fromkeys((pair.caption, pair.foil)))
    texts = {uid: list(row) for uid, row in captions.items()}
    found = score_texts(subject, texts, patches, [scorer], draws, seed, mean_patches_PD, on_scored)[scorer]
    return PairScores(
        caption=np.array([found.value[pair.uid, pair.caption] for pair in pairs]),
        foil=np.array([found.value[pair.uid, pair.foil] for pair in pairs]),
        stderr=np.array(
            [np.hypot(found.stderr[pair.uid, pair.caption], found.stderr[pair.uid, pair.foil]) for pair in pairs]
        ),
        blind_caption=np.array([found.blind[pair.caption] for pair in pairs]),
        blind_foil=np.array([found.blind[pair.foil] for pair in pairs]),
    )


def result_rows(pairs: Sequence[Pair], scores: PairScores, scorer: str) -> list[dict[str, Any]]:
    """Accuracies by row, that of all fair pairs first; a tie counts half."""
    names = list(dict.fromkeys(pair.row for pair in pairs))
    fair = np.array([pair.fair for pair in pairs])
    members = {ALL: fair} | {name: np.array([pair.row == name for pair in pairs]) for name in names}
    return [_row(name, scores, chosen, scorer) for name, chosen in members.items() if chosen.any()]


def _row(name: str, scores: PairScores, chosen: np.ndarray, scorer: str) -> dict[str, Any]:
    caption, foil = scores.caption[chosen], scores.foil[chosen]
    blind_caption, blind_foil = scores.blind_caption[chosen], scores.blind_foil[chosen]
    seen = judge(caption, foil)
    blind = judge(blind_caption, blind_foil)
    pmi = judge(caption - blind_caption, foil - blind_foil)
    return {
        "rule": name,
        "pairs": int(chosen.sum()),
        scorer: seen.accuracy,
        "blind": blind.accuracy,
        "pmi": pmi.accuracy,
        "ties": seen.ties,
        "blind_ties": blind.ties,
        "pmi_ties": pmi.ties,
        "mean_stderr": float(scores.stderr[chosen].mean()),
    }


def examples(pairs: Sequence[Pair], scores: PairScores, per_row: int, seed: int) -> list[dict[str, Any]]:
    """Some pairs of every row, drawn by seed whatever their scores, each of another picture and caption."""
    shown: list[int] = []
    for name in dict.fromkeys(pair.row for pair in pairs):
        rows = [i for i, pair in enumerate(pairs) if pair.row == name]
        rows.sort(key=lambda i: derive_seed(seed, "examples", pairs[i].uid, pairs[i].foil))
        first = {pairs[i].uid: i for i in reversed(rows)}
        shown += [i for i in rows if first[pairs[i].uid] == i][:per_row]
    return [
        {
            "uid": pairs[i].uid,
            "caption": pairs[i].caption,
            "foil": pairs[i].foil,
            "rule": pairs[i].row,
            "score_caption": float(scores.caption[i]),
            "score_foil": float(scores.foil[i]),
            "stderr": float(scores.stderr[i]),
            "blind_caption": float(scores.blind_caption[i]),
            "blind_foil": float(scores.blind_foil[i]),
        }
        for i in shown
    ]
