"""What is said of a trained model, from its frozen features and its scores, in files for report and tracking.

metrics.json        numbers alone, nested, for comparison between runs
probe.json          linear probes on the trained features and their floors
compositional.json  captions against foils, with the blind control
captions.json       what the model writes for test pictures
neighbours.json     the nearest training pictures of test pictures
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from mdc import dist
from mdc.config import EvaluateParams, Params
from mdc.data.shards import SAMPLES
from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.eval import compositional, measures
from mdc.eval.captioning import written_captions
from mdc.eval.features import Features, Viewer, read_features
from mdc.eval.index import measure_recall
from mdc.eval.knn import knn_predict
from mdc.eval.measures import UNKNOWN, Labels
from mdc.eval.probe import Grid, ProbeResult, linear_probe
from mdc.files import MANIFEST, read_manifest, sha256, whole_folder, write_json, write_manifest
from mdc.objectives.scoring import default_scorer
from mdc.train.checkpoint import LoadedModel, load_model

NAMES = {"model": "Trained encoder", "untrained": "Untrained encoder", "pixels": "Raw pixels"}
MAJORITY = "Most frequent class"
SPLITS = {
    "train": ("train",),
    "validation": ("validation",),
    "test": ("test",),
    "held-out": ("validation", "test"),
    "all": ("train", "validation", "test"),
}
DIGITS = 6  # of the numbers written: the last ones differ between machines
NEIGHBOURS = 6  # shown of each picture
RESAMPLES = 2000  # of the test groups, for intervals of differences


def evaluate(params: Params, shards: Path, model: Path, features: Path, output: Path) -> None:
    """Probe, k-NN, pairs of caption and foil, captions and neighbours, written as the files above.

    A part that the data or the objective does not allow is left empty with a note. Raises UserError if the features
    are those of another model.
    """
    read_manifest(shards, made_by="shard")
    read_manifest(model, made_by="pretrain")
    device = dist.pick_device(params.compute.device)
    loaded = load_model(model, device)
    found = read_features(features)
    if found.fingerprint != loaded.fingerprint:
        raise UserError(
            f"{features} holds features of model {found.fingerprint}, {model} is model {loaded.fingerprint}; "
            "run `mdc stage extract`"
        )
    p = params.evaluate
    probe, classified = _classification(p, found, device, label=params.download.label_column or "label")
    pairs, compared = _compositional(p, found, loaded, shards, device, params.extract.batch_size)
    uids = choose_pictures(found, "test", p.pictures, p.seed)
    index = {"recall_at_10": measure_recall(found.index, found.arrays["model"])}
    parts = {
        "metrics": {**classified, "compositional": compared, "index": index},
        "probe": probe,
        "compositional": pairs,
        "captions": _captions(p, found, loaded, shards, uids, device),
        "neighbours": {"examples": [_neighbours(found, uid) for uid in uids]},
    }
    with whole_folder(output) as temporary:
        for name, part in parts.items():
            write_json(temporary / f"{name}.json", _rounded(part))
        inputs = {
            "shards": sha256(shards / MANIFEST),
            "model": sha256(model / MANIFEST),
            "features": sha256(features / MANIFEST),
            "params": p.model_dump(mode="json"),
        }
        counts = {"rows": len(found.samples), "pairs": sum(rule["pairs"] for rule in pairs["rules"])}
        notes = {name: part["note"] for name, part in parts.items() if "note" in part}
        write_manifest(temporary, inputs, counts, notes=notes, fingerprint=loaded.fingerprint)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, DIGITS) if isinstance(value, float) else value


# Classes


def _classification(
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
        "classes": classes,
        "train": int(train.sum()),
        "holdout": 0,
        "test": int(test.sum()),
        "unlabelled": int((labels == "").sum()),
        "class_counts": dict(sorted(Counter(labels[train]).items())),
        "test_class_counts": dict(sorted(Counter(labels[test]).items())),
        "classes_only_in_test": unseen,
        "protocol": {
            "chosen_by": "accuracy on held-out training rows, whole groups at a time, anew for every seed",
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
    grid = Grid(p.probe_learning_rates, p.probe_weight_decays, p.probe_epochs, p.probe_holdout)

    rows, predictions, neighbours = [], {}, {}
    with tqdm(total=len(found.arrays) * p.probe_seeds * 2 * p.probe_epochs, desc="probe", unit="pass") as progress:
        for name, array in found.arrays.items():
            x_train, x_test = array[train], array[test]
            on_epoch = partial(progress.update, 1)
            tensors = [torch.from_numpy(x).to(device) for x in (x_train, x_test)]
            results = [
                linear_probe(tensors[0], y_train, groups[train], tensors[1], len(classes), grid, seed, on_epoch)
                for seed in (derive_seed(p.seed, "probe", repeat) for repeat in range(p.probe_seeds))
            ]
            facts["holdout"] = results[0].holdout
            rows.append(_probe_row(name, results, y_test, [*classes, *unseen]))
            predictions[name] = np.stack([result.predicted for result in results])
            found_k = knn_predict(x_train, y_train, x_test, len(classes), p.knn_k, device)
            neighbours[name] = {str(k): _measured(predicted, y_test) for k, predicted in found_k.items()}
    majority = np.bincount(y_train).argmax()
    rows.append(_majority_row(np.full_like(y_test, majority), y_test))
    margins = [
        {"over": name, **_margin(predictions["model"], other, y_test, groups[test], p.seed)}
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
        "lr": [result.lr for result in results],
        "weight_decay": [result.weight_decay for result in results],
        "holdout_accuracy": [result.holdout_accuracy for result in results],
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


def _margin(ours: np.ndarray, theirs: np.ndarray, truth: Labels, groups: np.ndarray, seed: int) -> dict[str, float]:
    """How much more often the model's features are right than a floor's, with a 95 % interval over test pictures.

    ours, theirs: predictions `[seeds, N]`. Whole groups are drawn with replacement, both sides the same ones.
    """
    gain_N = (ours == truth).mean(0) - (theirs == truth).mean(0)
    _, group_N = np.unique(groups.astype(str), return_inverse=True)
    gain_G, size_G = np.bincount(group_N, gain_N), np.bincount(group_N)
    random = np.random.default_rng(derive_seed(seed, "margin"))
    draws = random.integers(len(size_G), size=(RESAMPLES, len(size_G)))
    resampled = gain_G[draws].sum(1) / size_G[draws].sum(1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"accuracy": float(gain_N.mean()), "low": float(low), "high": float(high)}


# Captions against foils


def _compositional(
    p: EvaluateParams, found: Features, loaded: LoadedModel, shards: Path, device: torch.device, batch_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`compositional.json`, and the part "compositional" of the metrics."""
    scorer = default_scorer(loaded.config.pretrain.objective)
    pairs, left_out = compositional.make_pairs(_samples(p, found), p.swaps, p.max_pairs, p.seed)
    facts = {
        "scorer": scorer,
        "draws": p.compositional_draws,
        "split": p.compositional_split,
        "left_out": left_out.__dict__,
    }
    if not pairs:
        note = "no pairs: no caption of the evaluated split becomes another caption by a swap of evaluate.swaps"
        return {**facts, "rules": [], "examples": [], "note": note}, {}
    table = pq.read_table(shards / SAMPLES, columns=["caption", "tokens"])
    tokens = dict(zip(table["caption"].to_pylist(), table["tokens"].to_pylist(), strict=True))
    viewer = Viewer(loaded, shards, SPLITS[p.compositional_split], device)
    wanted = len({(pair.uid, text) for pair in pairs for text in (pair.caption, pair.foil)})
    with tqdm(total=wanted, desc="compositional", unit="caption") as progress:
        scores = compositional.score_pairs(
            pairs,
            tokens,
            loaded,
            viewer.patches,
            viewer.mean_patches(batch_size),
            scorer,
            p.compositional_draws,
            p.seed,
            progress.update,
        )
    rows = compositional.result_rows(pairs, scores, scorer)
    metrics = {row["rule"]: {key: value for key, value in row.items() if key != "rule"} for row in rows}
    rules = [row for row in rows if row["rule"] != compositional.ALL]
    shown = compositional.examples(pairs, scores, p.pictures, p.seed)
    return {**facts, "rules": rules, "examples": shown}, metrics


def _samples(p: EvaluateParams, found: Features) -> list[compositional.Sample]:
    evaluated = SPLITS[p.compositional_split]
    columns = (found.samples[name].tolist() for name in ("uid", "caption", "picture", "split"))
    return [
        compositional.Sample(uid, caption, picture, trained=split == "train", evaluated=split in evaluated)
        for uid, caption, picture, split in zip(*columns, strict=True)
    ]


# Pictures to look at


def choose_pictures(found: Features, split: str, count: int, seed: int) -> list[str]:
    """Uids of `count` pictures of a split, drawn by seed: one class after the other, and no two of one group."""
    rows = found.samples[found.samples["split"] == split]
    rows = rows.assign(place=[derive_seed(seed, "pictures", uid) for uid in rows["uid"]]).sort_values("place")
    rows = rows.drop_duplicates(["label", "group"])
    return rows.assign(turn=rows.groupby("label").cumcount()).sort_values(["turn", "label"])["uid"].tolist()[:count]


def _captions(
    p: EvaluateParams, found: Features, loaded: LoadedModel, shards: Path, uids: Sequence[str], device: torch.device
) -> dict[str, Any]:
    if not uids:
        return {"examples": [], "note": "no captions: the test split is empty"}
    captions = found.samples.set_index("uid")["caption"]
    with tqdm(total=len(uids), desc="captions", unit="caption") as progress:
        patches_MPD = Viewer(loaded, shards, ("test",), device).patches(uids)
        written = written_captions(loaded, patches_MPD, uids, [captions[u] for u in uids], p.caption_length, p.seed)
        progress.update(len(uids))
    return written


def _neighbours(found: Features, uid: str) -> dict[str, Any]:
    """The nearest training pictures of a picture, nearest first."""
    rows = found.samples
    own = int(np.flatnonzero(rows["uid"] == uid)[0])
    k, wanted = 4 * NEIGHBOURS, min(NEIGHBOURS, int((rows["split"] == "train").sum()))
    while True:
        similarities, near = found.index.search(found.arrays["model"][own : own + 1], k, found.fingerprint)
        shown = rows.iloc[near[0]].assign(similarity=similarities[0])
        trained = shown[shown["split"] == "train"]
        if len(trained) >= wanted:
            columns = ["uid", "caption", "similarity"]
            neighbours = trained[columns].head(NEIGHBOURS).to_dict("records")
            return {"uid": uid, "caption": rows["caption"].iloc[own], "neighbours": neighbours}
        k *= 4
