import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from mdc.eval.labelled import Labelled, Split
from mdc.eval.measures import UNKNOWN
from mdc.eval.probe import Grid
from mdc.eval.probing import Frozen, Options, few, measured, probe_encoder, warnings

GRID = Grid(learning_rates=(0.03, 0.1), weight_decays=(1e-6, 1e-4, 1e-2, 1e-1, 1.0), epochs=40, holdout=0.2)


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


def rows(frozen: dict[str, Frozen], data: Labelled, **options) -> list[dict]:
    return probe_encoder("x", frozen, data, Options(GRID, 2, 0, **options), torch.device("cpu"))


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
    for seed in range(3):
        kept = few(labels, 3, seed)
        assert np.bincount(labels[kept]).tolist() == [3, 2, 3]
    assert few(labels, None, 0).tolist() == list(range(16))
    assert few(labels, 3, 0).tolist() != few(labels, 3, 1).tolist()
    frozen, data = world(120, 300)
    by_method = {row["method"]: row for row in rows({"": frozen}, data, shots=[1, 4])}
    assert [by_method[name]["train"] for name in ("1-shot probe", "4-shot probe", "linear probe")] == [6, 24, 120]
    assert by_method["1-shot probe"]["top_1"] < by_method["linear probe"]["top_1"]
    assert set(by_method) == {"linear probe", "1-shot probe", "4-shot probe", "10-NN", "20-NN"}


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


def test_warnings_name_features_and_method() -> None:
    said = warnings([{"features": "x", "method": "linear probe", "converged": False, "grid_edge": True}])
    assert [line.split(":")[0] for line in said] == ["x, linear probe"] * 2
