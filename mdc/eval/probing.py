"""Any encoder on any labelled pictures: linear probe, few-shot probe and nearest neighbours, beside its floors.

The protocol is that of `mdc.eval.probe`: settings are chosen on a part of train, test is seen once, standardisation is
fitted on train, and every number of a probe is a mean over seeds with its interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mdc.draws import derive_seed
from mdc.eval import measures
from mdc.eval.attentive import attentive_probe
from mdc.eval.knn import knn_predict
from mdc.eval.labelled import Labelled
from mdc.eval.measures import Labels
from mdc.eval.probe import Grid, ProbeResult, choose_head, fit_head

MEASURES = ("top_1", "top_5", "mean_per_class")


@dataclass(frozen=True)
class Frozen:
    """One set of features of all training and test pictures, `[N, D]` and `[M, D]`."""

    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Options:
    """grid: of the probe. shots: pictures per class in all, tuning included, of few-shot probes. ks: of neighbours."""

    grid: Grid
    seeds: int
    seed: int
    shots: Sequence[int] = ()
    ks: Sequence[int] = (10, 20)


# Of the attentive probe, whose heads train one after the other
ATTENTIVE_RATES = (3e-4, 1e-3, 3e-3)
ATTENTIVE_DECAYS = (0.01,)


def probe_encoder(
    name: str,
    poolings: Mapping[str, Frozen],
    data: Labelled,
    options: Options,
    device: torch.device,
    on_epoch: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Rows of the table for one encoder: the probe on all of train, each few-shot probe, and k-NN for each k.

    poolings: features by the way patches were pooled; the probe chooses among them on held-out rows, as among learning
    rates and penalties. k-NN takes the first.
    """
    rows = []
    for shots in (None, *options.shots):
        results, chosen, used = [], [], 0
        for repeat in range(options.seeds):
            seed = derive_seed(options.seed, "probe", repeat)
            kept = few(data.train.labels, shots, seed)
            used = len(kept)
            pooling, result = _one(poolings, kept, data, options.grid, seed, device, on_epoch)
            results.append(result)
            chosen.append(pooling)
        rows.append(_probe_row(name, shots, results, chosen, used, data))
    first = next(iter(poolings.values()))
    classes = len(data.classes)
    found = knn_predict(np.asarray(first.train), data.train.labels, np.asarray(first.test), classes, options.ks, device)
    for k, predicted in found.items():
        row = {"features": name, "method": f"{k}-NN", "train": len(data.train), "test": len(data.test)}
        rows.append(row | _means([measured(predicted[:, None], data.test.labels)]))
    return rows


def attend_encoder(
    name: str,
    patches: Frozen,
    data: Labelled,
    options: Options,
    device: torch.device,
    on_epoch: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The row of the attentive probe. patches: `[N, P, D]` and `[M, P, D]`."""
    groups = data.train.groups or [str(row) for row in range(len(data.train))]
    results = [
        attentive_probe(
            patches.train,
            data.train.labels,
            groups,
            patches.test,
            len(data.classes),
            ATTENTIVE_RATES,
            ATTENTIVE_DECAYS,
            options.grid.epochs,
            options.grid.holdout,
            derive_seed(options.seed, "probe", repeat),
            device,
            on_epoch,
        )
        for repeat in range(options.seeds)
    ]
    row = _probe_row(name, None, results, ["attention"] * options.seeds, len(data.train), data)
    return {**row, "method": "attentive probe"}


def _one(
    poolings: Mapping[str, Frozen],
    kept: Labels,
    data: Labelled,
    grid: Grid,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[], object],
) -> tuple[str, ProbeResult]:
    """One seed's result with the best pooling, which alone meets the test pictures."""
    labels, classes = data.train.labels[kept], len(data.classes)
    groups = [data.train.groups[row] if data.train.groups else str(row) for row in kept]
    train = {name: torch.from_numpy(frozen.train[kept]).to(device) for name, frozen in poolings.items()}
    choices = {name: choose_head(rows, labels, groups, classes, grid, seed, on_epoch) for name, rows in train.items()}
    best = max(choices, key=lambda name: choices[name].accuracy)
    test = torch.from_numpy(np.array(poolings[best].test)).to(device)
    return best, fit_head(train[best], labels, test, classes, grid, choices[best], seed, on_epoch)


def few(labels: Labels, shots: int | None, seed: int) -> Labels:
    """Numbers of the training rows that are used: all, or `shots` of each class, drawn by seed, or all it has."""
    if shots is None:
        return np.arange(len(labels))
    random = np.random.default_rng(derive_seed(seed, "shots"))
    drawn = [random.permutation(np.flatnonzero(labels == label))[:shots] for label in np.unique(labels)]
    return np.sort(np.concatenate(drawn))


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


def _probe_row(
    name: str, shots: int | None, results: Sequence[ProbeResult], poolings: Sequence[str], used: int, data: Labelled
) -> dict[str, Any]:
    return {
        "features": name,
        "method": "linear probe" if shots is None else f"{shots}-shot probe",
        "train": used,
        "test": len(data.test),
        **_means([measured(result.ranked, data.test.labels) for result in results]),
        "pooling": list(poolings),
        "lr": [result.lr for result in results],
        "weight_decay": [result.weight_decay for result in results],
        "holdout": [result.holdout for result in results],
        "holdout_accuracy": [result.holdout_accuracy for result in results],
        "grid_edge": any(result.grid_edge for result in results),
        "converged": all(result.converged for result in results),
    }


def warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader of the table must know: heads that did not converge, settings at the edge of the grid."""
    said = []
    for row in rows:
        where = f"{row['features']}, {row['method']}"
        if not row.get("converged", True):
            said.append(f"{where}: the final head has not converged; train longer (--epochs)")
        if row.get("grid_edge"):
            said.append(f"{where}: the best penalty or learning rate lies at the edge of the grid; widen it")
    return said
