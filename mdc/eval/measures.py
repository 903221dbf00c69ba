"""Measures of classification, and intervals: of a mean over seeds, of a margin over test pictures."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mdc.draws import derive_seed

Labels = NDArray[np.int64]

RESAMPLES = 2000  # of the test groups, for the intervals of a margin
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


def margin(ours: np.ndarray, theirs: np.ndarray, truth: Labels, groups: np.ndarray, seed: int) -> dict[str, float]:
    """How much more often some features are right than others, with 95 % intervals over test pictures.

    ours, theirs: predictions `[seeds, N]`. Whole groups are drawn with replacement, both sides the same ones. Letters:
    N test rows, G groups, C classes, R resamples.
    """
    gain_N = (ours == truth).mean(0) - (theirs == truth).mean(0)
    _, group_N = np.unique(groups.astype(str), return_inverse=True)
    names, class_N = np.unique(truth, return_inverse=True)
    cell_N, shape = group_N * len(names) + class_N, (group_N.max() + 1, len(names))
    gain_GC, size_GC = (
        np.bincount(cell_N, weights, minlength=shape[0] * shape[1]).reshape(shape) for weights in (gain_N, None)
    )
    random = np.random.default_rng(derive_seed(seed, "margin"))
    times_RG = random.multinomial(shape[0], np.full(shape[0], 1 / shape[0]), size=RESAMPLES)
    gain_RC, size_RC = times_RG @ gain_GC, times_RG @ size_GC
    by_class_RC = np.divide(gain_RC, size_RC, out=np.full(gain_RC.shape, np.nan), where=size_RC > 0)
    margin: dict[str, float] = {}
    for name, mean, resampled in (
        ("accuracy", gain_N.mean(), gain_RC.sum(1) / size_RC.sum(1)),
        ("balanced_accuracy", (gain_GC.sum(0) / size_GC.sum(0)).mean(), np.nanmean(by_class_RC, axis=1)),
    ):
        low, high = np.quantile(resampled, [0.025, 0.975])
        margin |= {name: float(mean), f"{name}_low": float(low), f"{name}_high": float(high)}
    return margin
