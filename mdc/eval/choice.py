"""Questions with one right caption: is it scored above its foils? And how much of that takes the picture?

A tie is decided by a fair coin in expectation: one right caption tied with F foils at the top counts 1 / (F + 1), so a
scorer that always says the same gets exactly chance, and where the right caption stands among its foils is nothing.

Letters: N questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdc.errors import UserError

Numbers = NDArray[np.float64]


def credit(caption: Numbers, foils: Sequence[Numbers] | NDArray[Any]) -> tuple[Numbers, NDArray[np.bool_]]:
    """What each of N questions counts, 0 to 1, and which of them are ties at the top.

    caption: scores `[N]`. foils: the scores of each question's foils, at least one. Raises UserError for a score that
    is not a number: it is neither right nor wrong.
    """
    worth, tied = np.zeros(len(caption)), np.zeros(len(caption), dtype=bool)
    for place, (right, wrong) in enumerate(zip(caption, foils, strict=True)):
        wrong = np.atleast_1d(wrong)
        if np.isnan(right) or np.isnan(wrong).any():
            raise UserError(f"question {place} has a score that is not a number; look at the model or the scorer")
        equal = int((wrong == right).sum())
        if right >= wrong.max():
            worth[place] = 1 / (1 + equal)
            tied[place] = equal > 0
    return worth, tied


@dataclass(frozen=True)
class Share:
    """A share of questions answered right, with its standard error over pictures, and how many were ties."""

    value: float
    stderr: float
    ties: int


def share(worth: Numbers, tied: NDArray[np.bool_], pictures: Sequence[object]) -> Share:
    """The mean of N credits; questions of one picture hang together, so whole pictures are what varies."""
    mean = float(worth.mean())
    _, group = np.unique(np.array([str(picture) for picture in pictures]), return_inverse=True)
    away = np.bincount(group, worth - mean)
    groups = len(away)
    spread = np.sqrt((away**2).sum() * groups / max(1, groups - 1)) / len(worth)
    return Share(mean, float(spread), int(tied.sum()))


def macro(worth: Numbers, rows: Sequence[str], at_least: int = 1) -> float | None:
    """The mean over rows of each row's mean; rows of fewer questions than `at_least` are left out; None if all are."""
    names, group, counts = np.unique(np.array(rows, dtype=str), return_inverse=True, return_counts=True)
    means = np.bincount(group, worth, minlength=len(names)) / counts
    kept = counts >= at_least
    return float(means[kept].mean()) if kept.any() else None


def by_row(worth: Numbers, rows: Sequence[str]) -> Mapping[str, tuple[float, int]]:
    """Mean and number of questions of every row."""
    names, group, counts = np.unique(np.array(rows, dtype=str), return_inverse=True, return_counts=True)
    means = np.bincount(group, worth, minlength=len(names)) / counts
    return {str(name): (float(mean), int(count)) for name, mean, count in zip(names, means, counts, strict=True)}
