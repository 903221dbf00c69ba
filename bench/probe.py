"""Row `probe`: a grid of forty linear heads on frozen features, against scikit-learn over the same penalties."""

import warnings

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from bench.frame import Result, in_turn, rates
from mdc.eval.probe import Scale, passes_over, train_heads

ROUNDS = 2
ROWS, TEST_ROWS, WIDTH, CLASSES = 20_000, 10_000, 128, 10  # as CIFAR-10, with the width of the sample's encoder
PENALTIES = np.geomspace(1e-6, 1.0, 40).tolist()
RATE = 0.03
ITERATIONS = 1_000  # of L-BFGS at most; far fewer are taken


def features(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping clouds with a spectrum that falls as 1 / rank, mixed over all columns, as frozen features have it."""
    fixed, random = np.random.default_rng(0), np.random.default_rng(seed)
    spectrum = 1 / np.arange(1, WIDTH + 1)
    centres = 0.2 * fixed.normal(size=(CLASSES, WIDTH)) * spectrum
    mix = np.linalg.qr(fixed.normal(size=(WIDTH, WIDTH)))[0]
    labels = random.integers(CLASSES, size=rows)
    values = (centres[labels] + random.normal(size=(rows, WIDTH)) * spectrum) @ mix
    return values.astype(np.float32), labels


def measure() -> list[Result]:
    (train, labels), (test, truth) = features(ROWS, 1), features(TEST_ROWS, 2)
    scale = Scale.of(torch.from_numpy(train))
    x, x_test = scale(torch.from_numpy(train)), scale(torch.from_numpy(test))
    y, passes = torch.from_numpy(labels), passes_over(ROWS, 0)
    found: dict[str, list[float]] = {}

    def ours() -> None:
        heads = train_heads(x, y, CLASSES, [(RATE, penalty) for penalty in PENALTIES], passes, seed=0)
        found["ours"] = (heads.judge(x_test, torch.from_numpy(truth))[0] / TEST_ROWS).tolist()

    def theirs() -> None:
        fits = (LogisticRegression(C=1 / (p * ROWS), max_iter=ITERATIONS).fit(x.numpy(), labels) for p in PENALTIES)
        found["theirs"] = [float((fit.predict(x_test.numpy()) == truth).mean()) for fit in fits]

    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        taken = in_turn({"ours": ours, "theirs": theirs}, ROUNDS, warmup=0)
    best = {side: max(values) for side, values in found.items()}
    apart = max(abs(a - b) for a, b in zip(found["ours"], found["theirs"], strict=True))
    return [
        Result(
            "probe",
            f"{len(PENALTIES)} heads on {ROWS:,} x {WIDTH} features, {CLASSES} classes",
            "scikit-learn `LogisticRegression` at the same penalties",
            "heads/s",
            rates(len(PENALTIES), taken["ours"]),
            rates(len(PENALTIES), taken["theirs"]),
            aim=5.0,
            compared=f"{passes} passes, the default, with all heads side by side, against L-BFGS to its own tolerance, "
            f"head by head. Test accuracy of the best head: {100 * best['ours']:.2f} % and {100 * best['theirs']:.2f} "
            f"%; over all penalties they differ by at most {100 * apart:.2f} points",
        )
    ]
