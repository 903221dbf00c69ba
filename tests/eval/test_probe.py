import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from mdc.eval.knn import knn_predict
from mdc.eval.measures import UNKNOWN, accuracy, balanced_accuracy, recall_by_class, summarise
from mdc.eval.probe import (
    Choice,
    Grid,
    Judged,
    ProbeResult,
    Scale,
    choose_head,
    fit_head,
    held_out,
    passes_over,
    train_heads,
)

GRID = Grid(learning_rates=(0.01, 0.03, 0.1), weight_decays=(1e-6, 1e-4, 1e-2, 1e-1, 1.0), epochs=60)


def blobs(rows: int, seed: int, classes: int = 4, width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping clouds, one per class, whose centres do not depend on the seed."""
    centres = np.random.default_rng(0).normal(size=(classes, width)) * 0.9
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=rows)
    return (centres[labels] + random.normal(size=(rows, width))).astype(np.float32), labels


def probe(train, labels, test, classes=4, grid=GRID, seed=0) -> ProbeResult:
    folds = [held_out([str(i) for i in range(len(labels))], 0.2, seed)]
    train, test = torch.from_numpy(train), torch.from_numpy(test)
    choice = choose_head(train, labels, folds, classes, grid, seed)
    return fit_head(train, labels, test, classes, grid.epochs, choice, seed)


def test_a_converged_head_is_logistic_regression() -> None:
    train, labels = blobs(800, 1)
    test, _ = blobs(400, 2)
    scale = Scale.of(torch.from_numpy(train))
    x, penalty = scale(torch.from_numpy(train)), 1e-2
    heads = train_heads(x, torch.from_numpy(labels), 4, [(0.03, penalty)], epochs=200, seed=0)
    exact = LogisticRegression(C=1 / (penalty * len(x)), max_iter=1000, tol=1e-8).fit(x.numpy(), labels)
    centred = heads.weight_DHC[:, 0] - heads.weight_DHC[:, 0].mean(1, keepdim=True)
    np.testing.assert_allclose(centred.T, exact.coef_ - exact.coef_.mean(0), atol=0.03)
    found = heads.predict(scale(torch.from_numpy(test)))[:, 0].numpy()
    assert (found == exact.predict(scale(torch.from_numpy(test)).numpy())).mean() > 0.99
    assert heads.gradient_H[0] < 0.02


def test_agrees_with_logistic_regression_at_its_best_penalty() -> None:
    train, labels = blobs(1000, 1)
    test, truth = blobs(4000, 2)
    result = probe(train, labels, test)
    scale = Scale.of(torch.from_numpy(train))
    scaled, scaled_test = (scale(torch.from_numpy(x)).numpy() for x in (train, test))
    best = max(
        (LogisticRegression(C=c, max_iter=1000).fit(scaled, labels).predict(scaled_test) == truth).mean()
        for c in (1e-3, 1e-2, 1e-1, 1, 10)
    )
    assert abs(accuracy(result.predicted, truth) - best) < 0.005
    assert result.converged
    assert not result.grid_edge


def correlated(rows: int, seed: int, classes: int = 8, width: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """Clouds with a spectrum that falls as 1 / rank, mixed over all columns, as frozen features have it."""
    fixed, random = np.random.default_rng(0), np.random.default_rng(seed)
    spectrum = 1 / np.arange(1, width + 1)
    centres = 0.3 * fixed.normal(size=(classes, width)) * spectrum
    mix = np.linalg.qr(fixed.normal(size=(width, width)))[0]
    labels = random.integers(classes, size=rows)
    return ((centres[labels] + random.normal(size=(rows, width)) * spectrum) @ mix).astype(np.float32), labels


def test_correlated_features_converge_as_well() -> None:
    (train, labels), (test, truth) = correlated(6000, 1), correlated(6000, 2)
    scale = Scale.of(torch.from_numpy(train))
    x, x_test = scale(torch.from_numpy(train)), scale(torch.from_numpy(test))
    heads = train_heads(x, torch.from_numpy(labels), 8, [(0.03, 1e-4)], epochs=20, seed=0)
    exact = LogisticRegression(C=1 / (1e-4 * len(x)), max_iter=5000).fit(x.numpy(), labels)
    ours = (heads.predict(x_test)[:, 0].numpy() == truth).mean()
    assert abs(ours - exact.score(x_test.numpy(), truth)) < 0.003
    assert heads.gradient_H[0] < 0.02


def test_scale_and_offset_of_the_features_change_nothing() -> None:
    train, labels = blobs(400, 1)
    test, _ = blobs(200, 2)
    plain, scaled = probe(train, labels, test), probe(train * 1000 + 5, labels, test * 1000 + 5)
    assert plain.choice.weight_decay == scaled.choice.weight_decay
    assert (plain.predicted == scaled.predicted).mean() > 0.99


def test_a_constant_feature_does_no_harm() -> None:
    train, labels = blobs(400, 1)
    test, truth = blobs(400, 2)
    train, test = (np.hstack([x, np.full((len(x), 1), 0.1, np.float32)]) for x in (train, test))
    test[:, -1] = 1e4
    assert accuracy(probe(train, labels, test).predicted, truth) > 0.8


def test_random_labels_are_near_chance() -> None:
    random = np.random.default_rng(3)
    train, test = random.normal(size=(600, 8)).astype(np.float32), random.normal(size=(2000, 8)).astype(np.float32)
    result = probe(train, random.integers(4, size=600), test)
    assert abs(accuracy(result.predicted, random.integers(4, size=2000)) - 0.25) < 0.05


def test_same_seed_same_result_and_other_seed_other_holdout() -> None:
    train, labels = blobs(300, 1)
    test, _ = blobs(200, 2)
    first, again = probe(train, labels, test), probe(train, labels, test)
    np.testing.assert_array_equal(first.predicted, again.predicted)
    names = [str(i) for i in range(300)]
    assert (held_out(names, 0.2, 1) != held_out(names, 0.2, 2)).any()


def test_a_head_that_cannot_learn_enough_is_reported() -> None:
    train, labels = blobs(400, 1)
    slow = Grid(learning_rates=(1e-5, 2e-5), weight_decays=(1e-4, 1e-3, 1e-2), epochs=2)
    result = probe(train, labels, train, grid=slow)
    assert not result.converged
    assert result.grid_edge


def judged(accuracies: list[float], losses: list[float]) -> Judged:
    return Judged(np.array(accuracies) * 400, np.array(losses) * 400, 400)


def test_equal_heads_are_told_apart_by_their_loss() -> None:
    """A standard error of 0.8 on 400 rows is 0.02."""
    assert judged([0.80, 0.77, 0.75], [0.6, 0.5, 0.4]).best == 1
    assert judged([0.80, 0.70, 0.75], [0.6, 0.5, 0.4]).best == 0


@pytest.mark.parametrize(
    ("accuracies", "losses", "edge"),
    [
        ([0.80, 0.70, 0.60], [0.5, 0.6, 0.7], True),  # the end beats all others
        ([0.79, 0.79, 0.60], [0.5, 0.6, 0.7], True),
        ([0.79, 0.79, 0.60], [0.5, 0.503, 0.7], False),  # one within is as good
        ([0.70, 0.80, 0.60], [0.6, 0.5, 0.7], False),
        ([0.60, 0.70, 0.80], [0.7, 0.6, 0.5], True),
    ],
)
def test_edges_of_the_grid(accuracies: list[float], losses: list[float], edge: bool) -> None:
    assert judged(accuracies, losses).beyond([1e-4, 1e-2, 1.0]) == edge


def test_nothing_lies_below_no_penalty() -> None:
    best_first = judged([0.8, 0.7], [0.5, 0.6])
    assert best_first.beyond([1e-4, 1e-3])
    assert not best_first.beyond([0.0, 1e-3])
    assert not best_first.beyond([0.1, 0.1])


def test_a_converged_head_is_the_same_at_any_learning_rate() -> None:
    ranked = np.zeros((1, 1), dtype=np.int64)
    edge = Choice(0.1, 1e-2, 10, 0.5, rate_edge=True)
    assert ProbeResult(ranked, edge, 50, converged=False).grid_edge
    assert not ProbeResult(ranked, edge, 50, converged=True).grid_edge
    assert ProbeResult(ranked, Choice(0.1, 1e-2, 10, 0.5, decay_edge=True), 50, converged=True).grid_edge


def test_a_grid_that_ends_too_early_is_told() -> None:
    train, labels = blobs(400, 1)
    result = probe(train, labels, train, grid=Grid((0.03,), (1.0, 3.0, 10.0, 30.0), 60))
    assert result.choice.weight_decay == 1.0
    assert result.grid_edge


@pytest.mark.parametrize(
    ("rows", "passes"), [(10, 600), (256, 600), (512, 300), (2614, 60), (16_000, 60), (60_000, 18), (1_281_167, 4)]
)
def test_few_rows_are_gone_over_more_often(rows: int, passes: int) -> None:
    assert passes_over(rows, 0) == passes
    assert passes_over(rows, 7) == 7


def test_folds_are_held_out_in_turn() -> None:
    train, labels = blobs(60, 1)
    folds = [np.arange(60) % 3 == fold for fold in range(3)]
    choice = choose_head(torch.from_numpy(train), labels, folds, 4, GRID, 0)
    assert choice.holdout == 60
    assert 0.5 < (choice.accuracy or 0) < 1


def test_groups_are_held_out_whole() -> None:
    groups = [f"g{i // 7}" for i in range(140)]
    held = held_out(groups, 0.2, 5)
    assert 0 < held.sum() <= 28
    by_group = held.reshape(20, 7)
    assert (by_group.all(1) == by_group.any(1)).all()


def test_one_group_is_held_out_row_by_row() -> None:
    assert held_out(["same"] * 50, 0.2, 0).sum() == 10


def test_measures_by_hand() -> None:
    truth = np.array([0, 0, 0, 0, 1, 1, UNKNOWN])
    predicted = np.array([0, 0, 0, 1, 1, 0, 0])
    assert accuracy(predicted, truth) == pytest.approx(4 / 7)
    assert recall_by_class(predicted, truth) == {UNKNOWN: 0.0, 0: 0.75, 1: 0.5}
    assert balanced_accuracy(predicted, truth) == pytest.approx((0.75 + 0.5 + 0) / 3)


def test_interval_over_seeds_by_hand() -> None:
    mean, low, high = summarise([0.70, 0.72, 0.74])
    assert mean == pytest.approx(0.72)
    assert high - mean == pytest.approx(4.30265 * 0.02 / 3**0.5, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    assert summarise([0.5]) == (0.5, 0.5, 0.5)


def test_neighbours_vote_by_direction() -> None:
    angles = np.array([0.0, 0.1, 0.2, 1.5, 1.6])
    train = np.stack([np.cos(angles), np.sin(angles)], 1) * np.array([[1], [50], [0.1], [9], [1]])
    labels = np.array([0, 0, 0, 1, 1])
    test = np.array([[1.0, 0.05], [0.0, 300.0]])
    found = knn_predict(train, labels, test, 2, [1, 3, 50], "cpu")
    for k in (1, 3, 50):
        np.testing.assert_array_equal(found[k], [0, 1])


def test_neighbours_agree_with_a_plain_loop() -> None:
    train, labels = blobs(200, 1)
    test, _ = blobs(50, 2)
    found = knn_predict(train.astype(np.float16), labels, test.astype(np.float16), 4, [10], "cpu")[10]
    unit, query = (
        x / np.linalg.norm(x, axis=1, keepdims=True)
        for x in (train.astype(np.float16).astype(float), test.astype(np.float16).astype(float))
    )
    for row, cosines in enumerate(query @ unit.T):
        near = np.argsort(-cosines)[:10]
        votes = np.bincount(labels[near], np.exp(cosines[near] / 0.07), minlength=4)
        assert found[row] == votes.argmax()
