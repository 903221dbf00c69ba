"""Pictures and texts that belong together, found among many: retrieval both ways, and classes told by their names.

All pictures are scored against all texts by one scorer, with random numbers that are common to all; the encoder runs
once per picture. Beside the score stands PMI: the score minus the blind score of the text, which takes away how likely
the text is by itself. It changes nothing in finding pictures for a text.

A tie is decided by a fair draw in expectation, so a scorer that always says the same gets exactly chance.

Letters: M pictures, K texts, Q queries, C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.eval.scored import Key, Subject

SEEN_BYTES = 2**29  # of what the model sees of pictures, held at once
PICTURES_AT_ONCE = 64
RECALL_AT = (1, 5, 10)
TOP = (1, 5)

Matrix = NDArray[np.float64]
Marks = NDArray[np.bool_]


@dataclass(frozen=True)
class Scored:
    """Scores of M pictures with K texts, and the blind score of every text. `pmi`: one minus the other."""

    score_MK: Matrix
    blind_K: Matrix

    @property
    def pmi_MK(self) -> Matrix:
        return self.score_MK - self.blind_K


def score_matrix(
    subject: Subject,
    pictures: Sequence[Key],
    see: Callable[[Sequence[Key]], Tensor],
    texts: Sequence[str],
    scorer: str,
    draws: int,
    seed: int,
    on_scored: Callable[[int], object] = lambda count: None,
) -> Scored:
    """Score every picture with every text. see: keys -> what the subject sees, `[M, P, D]`; called once per picture.

    on_scored: told how many pictures were scored with all texts. Raises UserError for a score that is not finite.
    """
    stream, rows = derive_seed(seed, "retrieval"), list[Tensor]()
    total_PD: Tensor | float = 0.0
    held: list[Tensor] = []

    def score_held() -> None:
        seen_MPD = torch.cat(held)
        held.clear()
        rows.append(subject.score_seen(seen_MPD, [list(texts)], scorer, stream, draws).value_MK)
        on_scored(len(seen_MPD))

    for start in range(0, len(pictures), PICTURES_AT_ONCE):
        held.append(see(pictures[start : start + PICTURES_AT_ONCE]))
        total_PD = total_PD + held[-1].double().sum(0)
        if sum(part.nbytes for part in held) >= SEEN_BYTES:
            score_held()
    if held:
        score_held()
    if not rows or not texts:
        raise UserError(f"{len(pictures)} pictures and {len(texts)} texts: give at least one of each")
    assert isinstance(total_PD, Tensor)
    mean_PD = (total_PD / len(pictures)).float()
    blind_1K = subject.score_seen(mean_PD[None], [list(texts)], scorer, stream, draws).value_MK
    scored = Scored(torch.cat(rows).double().numpy(), blind_1K[0].double().numpy())
    if not (np.isfinite(scored.score_MK).all() and np.isfinite(scored.blind_K).all()):
        raise UserError(f"scorer {scorer!r} gives scores that are not finite; look at the model: it may have diverged")
    return scored


def found_at(scores_QC: Matrix, right_QC: Marks, ks: Sequence[int]) -> NDArray[np.float64]:
    """Whether one of the right candidates is among the k best of each query, `[Q, len(ks)]` from 0 to 1.

    Where the best right candidate is tied with wrong ones it is the probability of that under a random order of the
    tied. Raises UserError for a score that is no number, or a query without a right candidate.
    """
    if np.isnan(scores_QC).any():
        raise UserError("there are scores that are not numbers; look at the model or the scorer")
    if not right_QC.any(axis=1).all():
        raise UserError(f"query {int((~right_QC.any(axis=1)).argmax())} has no right candidate")
    best_Q = np.where(right_QC, scores_QC, -np.inf).max(axis=1)
    better_Q = ((scores_QC > best_Q[:, None]) & ~right_QC).sum(axis=1)
    tied_QC = scores_QC == best_Q[:, None]
    right_Q, wrong_Q = (tied_QC & right_QC).sum(axis=1), (tied_QC & ~right_QC).sum(axis=1)
    found = np.empty((len(scores_QC), len(ks)))
    for column, k in enumerate(ks):
        missed_Q = np.ones(len(scores_QC))  # by each of the k - better places that are left for the tied
        for place in range(k):
            left = place < k - better_Q
            chance = np.maximum(wrong_Q - place, 0) / np.maximum(right_Q + wrong_Q - place, 1)
            missed_Q = np.where(left, missed_Q * chance, missed_Q)
        found[:, column] = 1 - missed_Q
    return found


def retrieval(scored: Scored, right_MK: Marks, ks: Sequence[int] = RECALL_AT) -> dict[str, Any]:
    """Recall at each k, from pictures to texts by score and by PMI, and from texts to pictures; with its chance.

    right_MK: which texts belong to which pictures.
    """
    to_texts = {
        name: _recalls(found_at(matrix, right_MK, ks), ks)
        for name, matrix in (("score", scored.score_MK), ("pmi", scored.pmi_MK))
    }
    to_pictures = _recalls(found_at(scored.score_MK.T, right_MK.T, ks), ks)
    same = np.zeros_like(scored.score_MK)
    return {
        "pictures": right_MK.shape[0],
        "texts": right_MK.shape[1],
        "picture_to_text": {**to_texts, "chance": _recalls(found_at(same, right_MK, ks), ks)},
        "text_to_picture": {"score": to_pictures, "chance": _recalls(found_at(same.T, right_MK.T, ks), ks)},
    }


def _recalls(found_Qk: NDArray[np.float64], ks: Sequence[int]) -> dict[str, float]:
    return {f"recall_at_{k}": float(value) for k, value in zip(ks, found_Qk.mean(axis=0), strict=True)}


def zero_shot_texts(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Each class in each template, such as "a photo of a {}": all templates of the first class come first."""
    for template in templates:
        if "{}" not in template:
            raise UserError(f"template {template!r} has no place for the class; write {{}} there")
    return [template.replace("{}", name) for name in classes for template in templates]


def zero_shot(scored: Scored, labels: NDArray[np.int64], templates: int) -> dict[str, Any]:
    """Accuracies of naming the class of M pictures, by score and by PMI, with the blind answer as their control.

    scored: of texts from `zero_shot_texts`; a class's score is the mean over its templates. labels: `[M]`. "balanced"
    is the mean over classes. The blind answer is one class for all pictures.
    """

    def by_class(matrix: Matrix) -> Matrix:
        return matrix.reshape(len(matrix), -1, templates).mean(axis=2)

    classes = scored.score_MK.shape[1] // templates
    right_MC = labels[:, None] == np.arange(classes)
    ks = [k for k in TOP if k < classes] or [1]
    measured: dict[str, Any] = {"pictures": len(labels), "classes": classes, "templates": templates}
    blind_MK = np.broadcast_to(scored.blind_K, scored.score_MK.shape)
    for name, matrix in (("score", scored.score_MK), ("pmi", scored.pmi_MK), ("blind", blind_MK)):
        found_Mk = found_at(by_class(matrix), right_MC, ks)
        balanced = np.mean([found_Mk[labels == label, 0].mean() for label in np.unique(labels)])
        measured[name] = {f"top_{k}": float(value) for k, value in zip(ks, found_Mk.mean(axis=0), strict=True)}
        measured[name]["balanced"] = float(balanced)
    return {**measured, "chance": 1 / classes}


def belonging(captions: Sequence[Sequence[str]]) -> tuple[list[str], Marks]:
    """The different texts of all pictures, and which belong to which, `[M, K]`: equal texts are one."""
    place: Mapping[str, int] = {text: i for i, text in enumerate(dict.fromkeys(t for row in captions for t in row))}
    right_MK = np.zeros((len(captions), len(place)), dtype=bool)
    for row, texts in enumerate(captions):
        right_MK[row, [place[text] for text in texts]] = True
    return list(place), right_MK
