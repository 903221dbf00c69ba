"""Measures of classification, and the interval of a mean over seeds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Labels = NDArray[np.int64]

UNKNOWN = -1  # label of a test row whose class training never showed: no prediction equals it


class Summary(NamedTuple):
    """A mean over seeds with its 95 % interval by Student's t; the three are equal where there is one seed."""

    mean: float
    low: float
    high: float


def summarise(values: Sequence[float]) -> Summary:
    mean = float(np.mean(values))
    if len(values) < 2:
        return Summary(mean, mean, mean)
    reach = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return Summary(mean, max(0.0, mean - reach), min(1.0, mean + reach))


def accuracy(predicted: Labels, truth: Labels) -> float:
    return float((predicted == truth).mean())


def recall_by_class(predicted: Labels, truth: Labels) -> dict[int, float]:
    """The share of each class's rows that are predicted as that class, for the classes in `truth`."""
    return {int(c): float((predicted[truth == c] == c).mean()) for c in np.unique(truth)}


def balanced_accuracy(predicted: Labels, truth: Labels) -> float:
    """The mean over classes of `recall_by_class`: every class counts the same, however many rows it has."""
    return float(np.mean(list(recall_by_class(predicted, truth).values())))
