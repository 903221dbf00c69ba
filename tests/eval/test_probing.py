from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from mdc.config import EvaluateParams
from mdc.eval.classification import classify
from mdc.eval.features import Features
from mdc.eval.labelled import Labelled, Split
from mdc.eval.measures import UNKNOWN
from mdc.eval.probing import ONE_SHOT, Frozen, dealt, few, measured, probe_encoder, warnings

CPU = torch.device("cpu")
P = EvaluateParams(probe_learning_rates=[0.03], probe_weight_decays=[1e-4, 1e-3, 1e-2, 0.1, 1.0], probe_seeds=2)


def split(labels: np.ndarray) -> Split:
    return Split(labels, lambda number: None, [str(i) for i in range(len(labels))], "")  # type: ignore[arg-type,return-value]


def clouds(rows: int, seed: int, classes: int = 6, width: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping clouds whose centres do not depend on the seed."""
    centres = np.random.default_rng(0).normal(size=(classes, width))
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=rows)
    return (centres[labels] + random.normal(size=(rows, width))).astype(np.float16), labels


def world(train: int = 600, test: int = 2000) -> tuple[Frozen, Labelled]:
    (x, y), (x_test, y_test) = clouds(train, 1), clouds(test, 2)
    return Frozen(x, x_test), Labelled("clouds", list("abcdef"), split(y), split(y_test))


def rows(frozen: dict[str, Frozen], data: Labelled, shots: tuple[int, ...] = ()) -> list[dict]:
    return probe_encoder("x", frozen, data, P, shots, CPU)


def test_agrees_with_scikit_learn_at_its_best_penalty() -> None:
    frozen, data = world(3000, 10_000)
    (row, *_) = rows({"": frozen}, data)
    scaler = StandardScaler().fit(frozen.train)
    best = max(
        LogisticRegression(C=c, max_iter=2000)
        .fit(scaler.transform(frozen.train), data.train.labels)
        .score(scaler.transform(frozen.test), data.test.labels)
        for c in np.geomspace(1e-4, 1e2, 7)
    )
    assert abs(row["top_1"] - best) < 0.003
    assert row["converged"]
    assert not any("converged" in line for line in warnings([row]))
    assert row["top_1_low"] <= row["top_1"] <= row["top_1_high"]
    assert row["top_1"] < row["top_5"] <= 1


def test_few_shots_are_rows_in_all() -> None:
    labels = np.array([0] * 5 + [1] * 2 + [2] * 9)
    alone = np.arange(16).astype(str)
    for seed in range(3):
        kept = few(labels, alone, 3, seed)
        assert np.bincount(labels[kept]).tolist() == [3, 2, 3]
    assert few(labels, alone, 3, 0).tolist() != few(labels, alone, 3, 1).tolist()
    frozen, data = world(120, 300)
    by_method = {row["method"]: row for row in rows({"": frozen}, data, shots=(1, 4))}
    assert [by_method[name]["train"] for name in ("1-shot probe", "4-shot probe", "linear probe")] == [6, 24, 120]
    assert by_method["1-shot probe"]["top_1"] < by_method["linear probe"]["top_1"]
    assert set(by_method) == {"linear probe", "1-shot probe", "4-shot probe", "10-NN", "20-NN"}


def test_few_shots_come_from_as_many_groups_as_there_are() -> None:
    labels = np.repeat([0, 1], [12, 5])
    groups = np.array(["a"] * 8 + ["b"] * 3 + ["c"] + ["d"] * 5)
    for seed in range(5):
        kept = few(labels, groups, 3, seed)
        assert set(groups[kept][:3]) == {"a", "b", "c"}
        assert len(kept) == 6


def test_every_class_is_dealt_out_and_no_group_is_torn() -> None:
    labels, groups = np.repeat([0, 1, 2], [6, 4, 3]), np.array(list("aabbcd" + "eefg" + "hhh"))
    folds = dealt(labels, groups, 2, 0)
    assert [len(fold) for fold in folds] == [13, 13]
    held = np.array(folds)
    assert held[:, :10].sum(0).tolist() == [1] * 10
    assert not held[:, 10:].any(), "the only group of a class must stay"
    for name in set(groups):
        assert len({tuple(column) for column in held[:, groups == name].T}) == 1
    for label in (0, 1):
        assert all(0 < fold[labels == label].sum() < (labels == label).sum() for fold in folds)


def test_with_one_shot_nothing_is_chosen() -> None:
    frozen, data = world(120, 300)
    noise = Frozen(frozen.train[::-1], frozen.test[::-1])
    by_method = {row["method"]: row for row in rows({"first": frozen, "other": noise}, data, shots=(1,))}
    row = by_method["1-shot probe"]
    assert (row["lr"], row["weight_decay"]) == ([ONE_SHOT.lr] * 2, [ONE_SHOT.weight_decay] * 2)
    assert (row["holdout"], row["holdout_accuracy"], row["pooling"]) == ([0, 0], [None, None], ["first", "first"])
    assert not warnings([row])


def test_few_shots_give_no_warnings_on_plain_data() -> None:
    frozen, data = world(600, 300)
    p = EvaluateParams()
    said = warnings(probe_encoder("x", {"": frozen}, data, p, (1, 2, 10), CPU))
    assert said == []


def test_the_order_of_the_pictures_changes_nothing() -> None:
    frozen, data = world(200, 300)
    order = np.random.default_rng(0).permutation(200)
    keys = [f"{i:03d}" for i in range(200)]
    plain = Labelled("x", data.classes, split(data.train.labels), data.test)
    plain = replace(plain, train=replace(plain.train, keys=keys, groups=keys))
    other = replace(plain.train, labels=plain.train.labels[order], keys=[keys[i] for i in order])
    other = replace(other, groups=other.keys)
    assert rows({"": frozen}, plain) == rows(
        {"": Frozen(frozen.train[order], frozen.test)}, replace(plain, train=other)
    )


def test_the_stage_and_the_command_give_the_same_numbers() -> None:
    """The stage `evaluate` on a folder of features, and `mdc probe` on the same features."""
    frozen, data = world(150, 400)
    uids = [f"u{i:03d}" for i in range(150)] + [f"v{i:03d}" for i in range(400)]
    samples = pd.DataFrame(
        {
            "uid": uids,
            "split": ["train"] * 150 + ["test"] * 400,
            "label": [data.classes[label] for label in (*data.train.labels, *data.test.labels)],
            "group": [f"g{i // 3}" for i in range(550)],
        }
    )
    arrays = {"model": np.concatenate([frozen.train, frozen.test])}
    found = Features(samples, arrays, "", None)  # type: ignore[arg-type]
    told, metrics = classify(P, found, CPU, "label")
    train = replace(data.train, keys=uids[:150], groups=samples["group"].tolist()[:150])
    linear, *neighbours = rows({"": frozen}, replace(data, train=train))
    (stage,) = (row for row in told["rows"] if row["features"] == "model")
    for ours, theirs in (("top_1", "accuracy"), ("mean_per_class", "balanced_accuracy")):
        for end in ("", "_low", "_high"):
            assert linear[f"{ours}{end}"] == stage[f"{theirs}{end or '_mean'}"]
        for row, k in zip(neighbours, ("10", "20"), strict=True):
            assert row[ours] == metrics["knn"]["model"][k][theirs]
    for name in ("lr", "weight_decay", "holdout_accuracy", "grid_edge", "converged"):
        assert linear[name] == stage[name]
    assert told["holdout"] == linear["holdout"][0]


def test_the_better_pooling_is_chosen_on_held_out_rows() -> None:
    frozen, data = world()
    noise = np.random.default_rng(5).normal(size=frozen.train.shape).astype(np.float16)
    (row, *_) = rows({"noise": Frozen(noise, noise[:10].repeat(200, 0)), "good": frozen}, data)
    assert row["pooling"] == ["good", "good"]


def test_labels_by_chance_are_not_learnt() -> None:
    frozen, data = world(600, 3000)
    random = np.random.default_rng(0)
    shuffled = Labelled("chance", data.classes, split(random.permutation(data.train.labels)), data.test)
    (row, *_) = rows({"": frozen}, shuffled)
    assert abs(row["top_1"] - 1 / 6) < 0.05


def test_a_class_only_in_test_counts_as_wrong() -> None:
    truth = np.array([0, 0, 1, UNKNOWN])
    ranked = np.array([[0, 1], [1, 0], [1, 0], [0, 1]])
    values = measured(ranked, truth)
    assert values == {"top_1": 0.5, "mean_per_class": pytest.approx(0.5)}


def test_warnings_are_a_line_for_each_kind() -> None:
    bad = [{"features": name, "method": "linear probe", "converged": False, "grid_edge": True} for name in "xy"]
    said = warnings([*bad, {"features": "z", "method": "10-NN"}], unknown=3)
    assert [line.split(":")[0] for line in said[:2]] == ["x, linear probe; y, linear probe"] * 2
    assert "--epochs" in said[0]
    assert "--weight-decays" in said[1]
    assert said[2].startswith("3 test pictures are of classes")
    assert warnings([{"features": "z", "method": "linear probe", "converged": True, "grid_edge": False}]) == []
