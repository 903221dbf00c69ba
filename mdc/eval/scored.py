"""Captions scored against pictures, with the picture and blind: what every comparison of captions is made from.

Pictures are seen once, a part at a time; each caption of a picture is scored once, whatever number of questions ask for
it. Blind is the same scorer with the mean of what was seen in the picture's place, so a blind score belongs to the
caption alone.

Letters: M pictures, K captions of each, P patches, D width.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.objectives.scoring import Scores, Seeds

PICTURES_AT_ONCE = 64
BLIND_AT_ONCE = 4096  # captions

Key = TypeVar("Key", bound=Hashable)


class Subject(Protocol):
    """A model under evaluation that compares captions."""

    @property
    def scorers(self) -> Sequence[str]:
        """Those that fit it, the best one first."""

    def too_long(self, captions: Sequence[str]) -> Sequence[bool]:
        """Which captions the model cannot take whole."""

    def score_seen(
        self, seen_MPD: Tensor, captions: Sequence[Sequence[str]], scorer: str, seeds: Seeds, draws: int
    ) -> Scores:
        """K captions for each of M pictures, or one row of K captions for all of them, scored `[M, K]`.

        seen_MPD: what the model made of the pictures. seeds, draws: of `mc`, see `mdc.objectives.scoring.score`.
        """


class TextScores(Generic[Key]):
    """By one scorer: value and standard error of every (picture, caption), and the blind value of every caption."""

    def __init__(self) -> None:
        self.value: dict[tuple[Key, str], float] = {}
        self.stderr: dict[tuple[Key, str], float] = {}
        self.blind: dict[str, float] = {}


def score_texts(
    subject: Subject,
    captions: Mapping[Key, Sequence[str]],
    see: Callable[[Sequence[Key]], Tensor],
    scorers: Sequence[str],
    draws: int,
    seed: int,
    mean_seen_PD: Tensor | None = None,
    on_scored: Callable[[int], object] = lambda count: None,
) -> dict[str, TextScores[Key]]:
    """Score the captions of every picture by every scorer, with the picture and blind.

    captions: of each picture, by its key; each once. see: keys -> what the subject sees of them, `[M, P, D]`; called
    once per picture. mean_seen_PD: stands for "no picture"; None takes the mean over these pictures. All captions of a
    picture share their random numbers, and so do all blind captions. on_scored: told how many captions were scored by
    all scorers, blind ones too.
    """
    scores: dict[str, TextScores[Key]] = {name: TextScores() for name in scorers}
    total_PD: Tensor | float = 0.0
    for keys in _alike(captions):
        seen_MPD = see(keys)
        total_PD = total_PD + seen_MPD.double().sum(0)
        rows = [captions[key] for key in keys]
        seeds = [derive_seed(seed, "pairs", str(key)) for key in keys]
        pairs = [(key, text) for key in keys for text in captions[key]]
        for name in scorers:
            part = subject.score_seen(seen_MPD, rows, name, seeds, draws)
            scores[name].value |= zip(pairs, part.value_MK.flatten().tolist(), strict=True)
            scores[name].stderr |= zip(pairs, part.stderr_MK.flatten().tolist(), strict=True)
        on_scored(len(pairs))
    if mean_seen_PD is None and captions:
        assert isinstance(total_PD, Tensor)
        mean_seen_PD = (total_PD / len(captions)).float()
    texts = sorted({text for row in captions.values() for text in row}, key=lambda text: (len(text.split()), text))
    for start in range(0, len(texts), BLIND_AT_ONCE):
        chunk = texts[start : start + BLIND_AT_ONCE]
        assert mean_seen_PD is not None
        for name in scorers:
            blind = subject.score_seen(mean_seen_PD[None], [chunk], name, derive_seed(seed, "blind"), draws)
            scores[name].blind |= zip(chunk, blind.value_MK[0].tolist(), strict=True)
        on_scored(len(chunk))
    for name, found in scores.items():
        _check_finite(name, found)
    return scores


def _alike(captions: Mapping[Key, Sequence[str]]) -> list[list[Key]]:
    """Keys in parts of pictures with equally many captions, of about equal length."""

    def shape(key: Key) -> tuple[int, int, str]:
        row = captions[key]
        return len(row), max((len(text.split()) for text in row), default=0), str(key)

    parts: list[list[Key]] = []
    for _, alike in groupby(sorted(captions, key=shape), key=lambda key: len(captions[key])):
        together = list(alike)
        parts += [together[i : i + PICTURES_AT_ONCE] for i in range(0, len(together), PICTURES_AT_ONCE)]
    return parts


def _check_finite(scorer: str, scores: TextScores[Key]) -> None:
    for (key, text), value in scores.value.items():
        for what, number in ((f"at {key}", value), ("blind", scores.blind[text])):
            if not math.isfinite(number):
                raise UserError(
                    f"scorer {scorer!r} gives {number} for {text!r} {what}, which is no finite score; "
                    "look at the model: it may have diverged"
                )
