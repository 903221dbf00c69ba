"""Which class a picture belongs to, read off frozen features by linear probes and nearest neighbours, beside floors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from mdc.config import EvaluateParams
from mdc.eval import measures
from mdc.eval.features import Features
from mdc.eval.knn import knn_predict
from mdc.eval.measures import UNKNOWN, Labels
from mdc.eval.probe import ProbeResult
from mdc.eval.probing import Frozen, passes, probe_seeds

NAMES = {"model": "Trained encoder", "untrained": "Untrained encoder", "pixels": "Raw pixels"}
MAJORITY = "Most frequent class"


def classify(
    p: EvaluateParams, found: Features, device: torch.device, label: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`probe.json`, and the parts "probe" and "knn" of the metrics.

    Rows without a label are left out. Rows of test whose class training never showed stay, and count as wrong.
    """
    labels, splits, groups = (found.samples[name].to_numpy() for name in ("label", "split", "group"))
    train, test = ((splits == split) & (labels != "") for split in ("train", "test"))
    classes = sorted(set(labels[train]))
    unseen = sorted(set(labels[test]) - set(classes))
    facts = {
        "label": label,
        "layer": found.layer,
        "classes": classes,
        "train": int(train.sum()),
        "holdout": 0,
        "test": int(test.sum()),
        "unlabelled": int((labels == "").sum()),
        "class_counts": dict(sorted(Counter(labels[train]).items())),
        "test_class_counts": dict(sorted(Counter(labels[test]).items())),
        "classes_only_in_test": unseen,
        "protocol": {
            "chosen_by": "accuracy on held-out training rows, whole groups at a time, anew for every seed; "
            "within two standard errors of the best, the smallest loss",
            "final_head": "trained again on all training rows",
            "standardisation": "fitted on training rows",
            "penalty": "L2, part of the loss",
        },
    }
    if len(classes) < 2 or not test.any():
        note = f"no probe: train has {len(classes)} classes and test {int(test.sum())} labelled pictures"
        return {**facts, "rows": [], "margins": [], "note": f"{note}; name a column in download.label_column"}, {}
    ids = {name: number for number, name in enumerate(classes)}
    y_train, y_test = (np.array([ids.get(name, UNKNOWN) for name in labels[rows]]) for rows in (train, test))

    rows, predictions, neighbours = [], {}, {}
    total = len(found.arrays) * passes(p, len(y_train), len(classes), None, 1)
    with tqdm(total=total, desc="probe", unit="pass") as progress:
        for name, array in found.arrays.items():
            x_train, x_test = array[train], array[test]
            results = probe_seeds(
                {"": Frozen(x_train, x_test)}, y_train, groups[train], len(classes), p, device, progress.update
            )
            facts["holdout"] = results[0].choice.holdout
            rows.append(_probe_row(name, results, y_test, [*classes, *unseen]))
            predictions[name] = np.stack([result.predicted for result in results])
            found_k = knn_predict(x_train, y_train, x_test, len(classes), p.knn_k, device)
            neighbours[name] = {str(k): _measured(predicted, y_test) for k, predicted in found_k.items()}
    majority = np.bincount(y_train).argmax()
    rows.append(_majority_row(np.full_like(y_test, majority), y_test))
    margins = [
        {"over": name, **measures.margin(predictions["model"], other, y_test, groups[test], p.seed)}
        for name, other in predictions.items()
        if name != "model"
    ]
    metrics = {"probe": {row["features"]: _metrics_of(row) for row in rows}, "knn": neighbours}
    return {**facts, "rows": rows, "margins": margins}, metrics


def _measured(predicted: Labels, truth: Labels) -> dict[str, float]:
    return {
        "accuracy": measures.accuracy(predicted, truth),
        "balanced_accuracy": measures.balanced_accuracy(predicted, truth),
    }


def _probe_row(name: str, results: Sequence[ProbeResult], truth: Labels, classes: Sequence[str]) -> dict[str, Any]:
    recalls = [measures.recall_by_class(result.predicted, truth) for result in results]
    return {
        "features": name,
        "name": NAMES[name],
        **_over_seeds([_measured(result.predicted, truth) for result in results]),
        "recall_by_class": {
            classes[number] if number != UNKNOWN else "classes only in test": float(
                np.mean([r[number] for r in recalls])
            )
            for number in recalls[0]
        },
        "lr": [result.choice.lr for result in results],
        "weight_decay": [result.choice.weight_decay for result in results],
        "holdout_accuracy": [result.choice.accuracy for result in results],
        "grid_edge": any(result.grid_edge for result in results),
        "converged": all(result.converged for result in results),
    }


def _majority_row(predicted: Labels, truth: Labels) -> dict[str, Any]:
    return {"features": "majority", "name": MAJORITY, **_over_seeds([_measured(predicted, truth)])}


def _over_seeds(measured: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Per measure the values by seed, their mean, and the ends of the 95 % interval of that mean."""
    row: dict[str, Any] = {}
    for name in ("accuracy", "balanced_accuracy"):
        values = [each[name] for each in measured]
        mean, low, high = measures.summarise(values)
        row |= {name: values, f"{name}_mean": mean, f"{name}_low": low, f"{name}_high": high}
    return row


def _metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    ends = {key: row[key] for key in ("accuracy_low", "accuracy_high")} if len(row["accuracy"]) > 1 else {}
    return {"accuracy": row["accuracy_mean"], "balanced_accuracy": row["balanced_accuracy_mean"], **ends}
