"""Any encoder on any labelled pictures: linear probe, few-shot probe and nearest neighbours, beside its floors.

The protocol is that of `mdc.eval.probe`: settings are chosen on a part of train, test is seen once, standardisation is
fitted on train, and every number of a probe is a mean over seeds with its interval.

A few-shot probe has k pictures per class in all, tuning included. Each seed draws its own, from as many groups as there
are. Settings are chosen by cross-validation among them: every class is dealt out over the folds, at most `FOLDS` and at
most k, and whole groups go together. With one picture per class nothing can be held out, and nothing is chosen: the
head has the fixed settings `ONE_SHOT`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mdc.config import EvaluateParams
from mdc.draws import derive_seed
from mdc.eval import measures
from mdc.eval.attentive import attentive_probe
from mdc.eval.knn import knn_predict
from mdc.eval.labelled import Labelled
from mdc.eval.measures import Labels
from mdc.eval.probe import Choice, Grid, ProbeResult, choose_head, fit_head, held_out, passes_over

MEASURES = ("top_1", "top_5", "mean_per_class")
FOLDS = 5  # of few-shot probes
ONE_SHOT = Choice(lr=0.03, weight_decay=1.0)  # the penalty that was best or nearly on every set tried

OnEpoch = Callable[[], object]


def _silent() -> None:
    pass


@dataclass(frozen=True)
class Frozen:
    """One set of features of all training and test pictures, `[N, D]` and `[M, D]`."""

    train: np.ndarray
    test: np.ndarray

    def sorted_by(self, order: Labels) -> "Frozen":
        """With the training pictures in another order."""
        return Frozen(self.train[order], self.test)


def probe_encoder(
    name: str,
    poolings: Mapping[str, Frozen],
    data: Labelled,
    p: EvaluateParams,
    shots: Sequence[int],
    device: torch.device,
    on_epoch: OnEpoch = _silent,
) -> list[dict[str, Any]]:
    """Rows of the table for one encoder: the probe on all of train, each few-shot probe, and k-NN for each k.

    poolings: features by the way patches were pooled; the probe chooses among them on held-out rows, as among learning
    rates and penalties. k-NN takes the first, as does a probe with nothing to choose by. shots: pictures per class.
    """
    order = np.argsort(data.train.keys, kind="stable")  # what follows depends on the pictures, not on how they lie
    labels, groups = data.train.labels[order], groups_of(data)[order]
    poolings = {pooling: frozen.sorted_by(order) for pooling, frozen in poolings.items()}
    classes = len(data.classes)
    rows = []
    for count in (None, *shots):
        results = probe_seeds(poolings, labels, groups, classes, p, device, on_epoch, count)
        method = "linear probe" if count is None else f"{count}-shot probe"
        rows.append(_probe_row(name, method, results, data))
    first = next(iter(poolings.values()))
    found = knn_predict(np.asarray(first.train), labels, np.asarray(first.test), classes, p.knn_k, device)
    for k, predicted in found.items():
        row = {"features": name, "method": f"{k}-NN", "train": len(data.train), "test": len(data.test)}
        rows.append(row | _means([measured(predicted[:, None], data.test.labels)]))
    return rows


def groups_of(data: Labelled) -> np.ndarray:
    """Names of the training pictures' groups: without groups, each is one of its own."""
    return np.asarray(data.train.groups or list(map(str, range(len(data.train)))), dtype=str)


def attend_encoder(
    name: str,
    patches: Frozen,
    data: Labelled,
    p: EvaluateParams,
    device: torch.device,
    on_epoch: OnEpoch = _silent,
) -> dict[str, Any]:
    """The row of the attentive probe. patches: `[N, P, D]` and `[M, P, D]`."""
    labels, groups, classes = data.train.labels, groups_of(data), len(data.classes)
    results = [
        attentive_probe(
            patches.train,
            labels,
            groups,
            patches.test,
            classes,
            p.probe_epochs,
            p.probe_holdout,
            derive_seed(p.seed, "probe", repeat),
            device,
            on_epoch,
        )
        for repeat in range(p.probe_seeds)
    ]
    return _probe_row(name, "attentive probe", results, data)


def probe_seeds(
    poolings: Mapping[str, Frozen],
    labels: Labels,
    groups: np.ndarray,
    classes: int,
    p: EvaluateParams,
    device: torch.device,
    on_epoch: OnEpoch = _silent,
    shots: int | None = None,
) -> list[ProbeResult]:
    """The linear probe of each seed, with the best pooling, which alone meets the test pictures.

    labels: `[N]` classes 0 .. classes - 1 of the training rows. groups: `[N]` names. shots: None is all of train.
    """
    grid = Grid(p.probe_learning_rates, p.probe_weight_decays, p.probe_epochs)

    def one(seed: int) -> ProbeResult:
        kept = np.arange(len(labels)) if shots is None else few(labels, groups, shots, seed)
        if shots is None:
            folds = [held_out(groups, p.probe_holdout, derive_seed(seed, "holdout"))]
        else:
            folds = dealt(labels[kept], groups[kept], min(FOLDS, shots), derive_seed(seed, "holdout"))

        def rows(pooling: str) -> torch.Tensor:
            return torch.from_numpy(np.array(poolings[pooling].train[kept])).to(device)

        choices = [
            replace(choose_head(rows(pooling), labels[kept], folds, classes, grid, seed, on_epoch), pooling=pooling)
            for pooling in poolings
            if folds
        ]
        choice = max(choices, key=lambda c: c.accuracy or 0.0, default=replace(ONE_SHOT, pooling=next(iter(poolings))))
        test = torch.from_numpy(np.array(poolings[choice.pooling].test)).to(device)
        return fit_head(rows(choice.pooling), labels[kept], test, classes, grid.epochs, choice, seed, on_epoch)

    return [one(derive_seed(p.seed, "probe", repeat)) for repeat in range(p.probe_seeds)]


def passes(p: EvaluateParams, rows: int, classes: int, shots: int | None, poolings: int) -> int:
    """How often `probe_seeds` calls `on_epoch`, about."""
    used = rows if shots is None else min(rows, shots * classes)
    folds = 1 if shots is None else min(FOLDS, shots) if shots > 1 else 0
    held = p.probe_holdout if shots is None else 1 / max(1, folds)
    choosing = folds * poolings * passes_over(max(1, round(used * (1 - held))), p.probe_epochs)
    return p.probe_seeds * (choosing + passes_over(used, p.probe_epochs))


def few(labels: Labels, groups: np.ndarray, shots: int, seed: int) -> Labels:
    """Numbers of `shots` rows of each class, or all it has: drawn by seed, from as many of its groups as there are."""
    drawn = np.random.default_rng(derive_seed(seed, "shots")).permutation(len(labels))
    seen: Counter[tuple[int, str]] = Counter()
    turns = np.empty(len(labels), dtype=np.int64)  # how many of the same class and group were drawn before
    for row in drawn:
        which = labels[row], groups[row]
        turns[row] = seen[which]
        seen[which] += 1
    drawn = drawn[np.argsort(turns[drawn], kind="stable")]
    return np.sort(np.concatenate([drawn[labels[drawn] == label][:shots] for label in np.unique(labels)]))


def dealt(labels: Labels, groups: np.ndarray, count: int, seed: int) -> list[np.ndarray]:
    """Folds to hold out in turn, each `[N]` bool: the groups of every class are dealt to `count` of them.

    The only group of a class is never held out, for its class would be lost; there may be no folds at all.
    """
    random = np.random.default_rng(seed)
    fold_of: dict[str, int] = {}
    for label in np.unique(labels):
        own = [name for name in random.permutation(np.unique(groups[labels == label])) if name not in fold_of]
        if len(np.unique(groups[labels == label])) > 1:
            fold_of |= {name: place % count for place, name in enumerate(own)}
    fold_N = np.array([fold_of.get(name, -1) for name in groups])
    return [fold_N == fold for fold in range(count) if (fold_N == fold).any()]


def measured(ranked: Labels, truth: Labels) -> dict[str, float]:
    """Of ranked classes `[M, R]`. top_5 only where five were ranked."""
    values = {
        "top_1": measures.accuracy(ranked[:, 0], truth),
        "mean_per_class": measures.balanced_accuracy(ranked[:, 0], truth),
    }
    if ranked.shape[1] >= 5:
        values["top_5"] = float((ranked[:, :5] == truth[:, None]).any(axis=1).mean())
    return values


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in MEASURES:
        if name in values[0]:
            mean, low, high = measures.summarise([each[name] for each in values])
            row |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return row


def _probe_row(name: str, method: str, results: Sequence[ProbeResult], data: Labelled) -> dict[str, Any]:
    choices = [result.choice for result in results]
    return {
        "features": name,
        "method": method,
        "train": results[0].train,
        "test": len(data.test),
        **_means([measured(result.ranked, data.test.labels) for result in results]),
        "pooling": [choice.pooling for choice in choices],
        "lr": [choice.lr for choice in choices],
        "weight_decay": [choice.weight_decay for choice in choices],
        "holdout": [choice.holdout for choice in choices],
        "holdout_accuracy": [choice.accuracy for choice in choices],
        "grid_edge": any(result.grid_edge for result in results),
        "converged": all(result.converged for result in results),
    }


def warnings(rows: Sequence[Mapping[str, Any]], unknown: int = 0) -> list[str]:
    """What a reader of the table must know, a line for each kind with the rows that it is true of: heads that did not
    converge, settings at the edge of the grid, and test pictures of classes that train lacks.
    """
    kinds = {
        "did not converge; train longer (--epochs)": [row for row in rows if not row.get("converged", True)],
        "chose the smallest or largest value of the grid, and one beyond it might be better; widen it "
        "(--weight-decays, --learning-rates)": [row for row in rows if row.get("grid_edge")],
    }
    said = [
        f"{'; '.join(', '.join((row['features'], row['method'])) for row in found)}: {what}"
        for what, found in kinds.items()
        if found
    ]
    if unknown:
        said.append(f"{unknown} test pictures are of classes that no training picture has; they count as wrong")
    return said
