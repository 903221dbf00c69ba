"""Linear probe on frozen features: a grid of softmax heads trained side by side in one pass over the features.

The protocol, for every seed: a fifth of the training rows is held out, whole groups at a time; every learning rate is
paired with every L2 penalty; the head with the best accuracy on the held-out rows wins, or of those within two standard
errors of it the one with the smallest loss there; a head with its settings is trained on all training rows; the test
rows are seen once, by that head. The penalty is part of the loss, so that a converged head is logistic regression with
C = 1 / (penalty x rows), whatever its learning rate.

Heads are trained along the principal axes of the features. A rotation leaves loss and penalty as they are, but Adam
scales each axis by itself: where features are as correlated as those of encoders, far fewer passes are needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mdc.draws import derive_seed
from mdc.eval.measures import Labels

# N rows, D feature width, H heads, C classes, B rows of a batch

BATCH = 256  # rows per update, at most
PASSES = 60  # over the rows, where that is within the next two
UPDATES = 600, 4000  # of a training: what small sets need to converge, and what suffices for large ones
FEWEST_PASSES = 4  # over the largest sets
ROWS_AT_ONCE = 4096  # where no update waits
RANKED = 5  # classes of a test row that are kept
SAME_LOSS = 0.01  # nats a row
CONVERGED = 0.02  # largest gradient norm at the end, as a share of that at the start


@dataclass(frozen=True)
class Grid:
    """The heads to choose from and how long they train."""

    learning_rates: Sequence[float]
    weight_decays: Sequence[float]
    epochs: int  # passes; 0 = as many as `passes_over` says

    @property
    def cells(self) -> list[tuple[float, float]]:
        """Every (learning rate, weight decay)."""
        return [(lr, decay) for lr in self.learning_rates for decay in self.weight_decays]


def passes_over(rows: int, epochs: int, usual: int = PASSES) -> int:
    """How often to go over so many rows: `epochs`, or, where that is 0, what their number asks for."""
    fewest, most = (math.ceil(updates / math.ceil(rows / BATCH)) for updates in UPDATES)
    return epochs or max(FEWEST_PASSES, min(max(usual, fewest), most))


@dataclass(frozen=True)
class Judged:
    """How H heads did on held-out rows."""

    right_H: np.ndarray
    loss_H: np.ndarray  # cross-entropy, summed over the rows
    rows: int

    @property
    def accuracy_H(self) -> np.ndarray:
        return self.right_H / self.rows

    @property
    def equal_H(self) -> np.ndarray:
        """Heads whose accuracy is within two standard errors of the best one: rows as few cannot tell them apart."""
        best = self.accuracy_H.max()
        return self.accuracy_H >= best - 2 * math.sqrt(best * (1 - best) / self.rows)

    @property
    def best(self) -> int:
        """Of equal heads that with the smallest loss, which varies less from one choice of rows to the next."""
        return int(np.where(self.equal_H, self.loss_H, np.inf).argmin())

    def beyond(self, values: Sequence[float]) -> bool:
        """Whether a value beyond those tried might have been better: the best head has the smallest or the largest, and
        no head with another one is equal and has a loss as small, to `SAME_LOSS`. Nothing lies below a value of zero.
        """
        ends = np.isin(values, [max(values), min(values) or max(values)])
        as_good = self.equal_H & (self.loss_H <= self.loss_H[self.best] + SAME_LOSS * self.rows)
        return len(set(values)) > 1 and bool(ends[self.best]) and not (as_good & ~ends).any()


@dataclass(frozen=True)
class Choice:
    """The best settings on the held-out rows; accuracy None where none could be held out and nothing was chosen.

    rate_edge, decay_edge: whether a learning rate or a penalty beyond those tried might have been better.
    """

    lr: float
    weight_decay: float
    holdout: int = 0  # rows on which it was chosen
    accuracy: float | None = None
    rate_edge: bool = False
    decay_edge: bool = False
    pooling: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """One seed's outcome."""

    ranked: Labels  # of the test rows: the likeliest classes, `[M, RANKED]` or as many as there are, likeliest first
    choice: Choice
    train: int  # rows of the final head
    converged: bool

    @property
    def predicted(self) -> Labels:
        return self.ranked[:, 0]

    @property
    def grid_edge(self) -> bool:
        """A converged head would be the same at any learning rate."""
        return self.choice.decay_edge or (self.choice.rate_edge and not self.converged)


@dataclass(frozen=True)
class Heads:
    """Trained heads: logits are `features @ weight + bias`."""

    weight_DHC: Tensor
    bias_HC: Tensor
    gradient_H: Tensor  # gradient norm of the whole loss at the end, as a share of that of an all-zero head

    def predict(self, features_ND: Tensor) -> Tensor:
        """The class of every row by every head, `[N, H]`."""
        return torch.cat(
            [_logits(chunk, self.weight_DHC, self.bias_HC).argmax(-1) for chunk in features_ND.split(ROWS_AT_ONCE)]
        )

    def judge(self, features_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """Right rows of every head, and the sum over rows of its cross-entropy, each `[H]`."""
        right_H, loss_H = torch.zeros(2, self.bias_HC.shape[0], dtype=torch.double, device=features_ND.device)
        for rows_BD, truth_B in zip(features_ND.split(ROWS_AT_ONCE), labels_N.split(ROWS_AT_ONCE), strict=True):
            logits_BHC = _logits(rows_BD, self.weight_DHC, self.bias_HC)
            right_H += (logits_BHC.argmax(-1) == truth_B[:, None]).sum(0)
            chosen_BH1 = truth_B[:, None, None].expand(-1, logits_BHC.shape[1], 1)
            loss_H -= logits_BHC.log_softmax(-1).gather(2, chosen_BH1).sum((0, 2), dtype=torch.double)
        return right_H, loss_H

    def ranked(self, features_ND: Tensor, head: int = 0) -> Tensor:
        """The likeliest classes of every row by one head, `[N, RANKED]` or as many as there are, likeliest first."""
        weight_D1C, bias_1C = self.weight_DHC[:, head : head + 1], self.bias_HC[head : head + 1]
        logits = (_logits(chunk, weight_D1C, bias_1C)[:, 0] for chunk in features_ND.split(ROWS_AT_ONCE))
        return torch.cat([chunk.topk(min(RANKED, chunk.shape[1])).indices for chunk in logits])


def choose_head(
    train: Tensor,
    labels: Labels,
    folds: Sequence[np.ndarray],
    classes: int,
    grid: Grid,
    seed: int,
    on_epoch: Callable[[], object] = lambda: None,
) -> Choice:
    """Train all heads of the grid on a part of train, and take the one that is best on the rest.

    train: `[N, D]` floats. labels: `[N]` classes 0 .. classes - 1. folds: rows that are held out, `[N]` bool; several
    folds are held out in turn, and their rows count together. on_epoch: called after each pass.
    """
    truth, rows = torch.from_numpy(labels).to(train.device), int(sum(fold.sum() for fold in folds))
    right_H, loss_H = torch.zeros(2, len(grid.cells), dtype=torch.double, device=train.device)
    for number, fold in enumerate(folds):
        held, some = torch.from_numpy(fold).to(train.device), derive_seed(seed, "grid", number)
        scale = Scale.of(train[~held])
        epochs = passes_over(len(train) - int(fold.sum()), grid.epochs)
        heads = train_heads(scale(train[~held]), truth[~held], classes, grid.cells, epochs, some, on_epoch)
        right, loss = heads.judge(scale(train[held]), truth[held])
        right_H, loss_H = right_H + right, loss_H + loss
    judged = Judged(right_H.cpu().numpy(), loss_H.cpu().numpy(), rows)
    rates, decays = zip(*grid.cells, strict=True)
    best = judged.best
    return Choice(
        rates[best], decays[best], rows, float(judged.accuracy_H[best]), judged.beyond(rates), judged.beyond(decays)
    )


def fit_head(
    train: Tensor,
    labels: Labels,
    test: Tensor,
    classes: int,
    epochs: int,
    choice: Choice,
    seed: int,
    on_epoch: Callable[[], object] = lambda: None,
) -> ProbeResult:
    """Train the chosen head on all of train, and rank the classes of test, `[M, D]`. epochs: as of `Grid`."""
    truth, scale = torch.from_numpy(labels).to(train.device), Scale.of(train)
    cells = [(choice.lr, choice.weight_decay)]
    passes = passes_over(len(train), epochs)
    final = train_heads(scale(train), truth, classes, cells, passes, derive_seed(seed, "final"), on_epoch)
    converged = bool(final.gradient_H[0] <= CONVERGED)
    return ProbeResult(final.ranked(scale(test)).cpu().numpy(), choice, len(labels), converged)


def held_out(groups: Sequence[str] | np.ndarray, share: float, seed: int) -> np.ndarray:
    """Which rows to hold out, `[N]` bool: whole groups in random order, up to `share` of the rows, at least one.

    With fewer than two groups single rows are drawn.
    """
    names, group_N = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    if len(names) < 2:
        group_N = np.arange(len(group_N))
    sizes = np.bincount(group_N)
    order = np.random.default_rng(seed).permutation(len(sizes))
    taken = np.cumsum(sizes[order]) <= share * len(group_N)
    taken[0] = True
    return np.isin(group_N, order[taken])


@dataclass(frozen=True)
class Scale:
    """Standardisation with the mean and deviation of the rows that it was fitted on."""

    mean_D: Tensor
    factor_D: Tensor

    @classmethod
    def of(cls, rows_ND: Tensor) -> "Scale":
        """A column that hardly varies for its size holds rounding errors: it is set to zero."""
        rows_ND = rows_ND.double()
        deviation_D, mean_D = torch.std_mean(rows_ND, dim=0, correction=0)
        constant_D = deviation_D <= 1e-6 * rows_ND.abs().amax(0)
        return cls(mean_D, torch.where(constant_D, 0.0, 1 / deviation_D.where(~constant_D, deviation_D.new_ones(()))))

    def __call__(self, rows_ND: Tensor) -> Tensor:
        return ((rows_ND.double() - self.mean_D) * self.factor_D).float()


def train_heads(
    features_ND: Tensor,
    labels_N: Tensor,
    classes: int,
    cells: Sequence[tuple[float, float]],
    epochs: int,
    seed: int,
    on_epoch: Callable[[], object] = lambda: None,
) -> Heads:
    """Train one softmax head per (learning rate, L2 penalty), all on the same batches, by Adam with a cosine to zero.

    features_ND: standardised. The heads start at zero and share nothing but the order of the batches.
    """
    device, axes_DD = features_ND.device, _principal_axes(features_ND)
    features_ND = features_ND @ axes_DD
    generator = torch.Generator().manual_seed(seed)
    lr_H, decay_H = (torch.tensor(column, device=device) for column in zip(*cells, strict=True))
    onehot_NC = F.one_hot(labels_N, classes).float()

    # Adam's step does not depend on the gradient's size: with weight = lr * parameter one optimiser serves all rates.
    parameters = [
        torch.zeros(features_ND.shape[1], len(cells), classes, device=device),
        torch.zeros(len(cells), classes, device=device),
    ]
    optimiser = torch.optim.Adam(parameters, lr=1.0, fused=True)
    batches = math.ceil(len(features_ND) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * batches)
    start_H = _gradient_norm(features_ND, onehot_NC, parameters[0], parameters[1], decay_H)
    for _ in range(epochs):
        for rows_B in torch.randperm(len(features_ND), generator=generator).to(device).chunk(batches):
            weight_DHC, bias_HC = (parameter * lr_H[:, None] for parameter in parameters)
            gradients = _gradients(features_ND[rows_B], onehot_NC[rows_B], weight_DHC, bias_HC, decay_H)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()
            schedule.step()
        on_epoch()
    weight_DHC, bias_HC = (parameter * lr_H[:, None] for parameter in parameters)
    end_H = _gradient_norm(features_ND, onehot_NC, weight_DHC, bias_HC, decay_H)
    return Heads(torch.einsum("de,ehc->dhc", axes_DD, weight_DHC), bias_HC, end_H / start_H)


def _principal_axes(features_ND: Tensor) -> Tensor:
    """An orthogonal `[D, D]` whose columns are the directions of the features, in order of their second moments."""
    moments_DD = sum(chunk.double().T @ chunk.double() for chunk in features_ND.split(ROWS_AT_ONCE))
    assert isinstance(moments_DD, Tensor)
    return torch.linalg.eigh(moments_DD).eigenvectors.float()


def _logits(features_BD: Tensor, weight_DHC: Tensor, bias_HC: Tensor) -> Tensor:
    return torch.einsum("bd,dhc->bhc", features_BD, weight_DHC) + bias_HC


def _gradients(
    features_BD: Tensor, onehot_BC: Tensor, weight_DHC: Tensor, bias_HC: Tensor, decay_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each head's mean cross-entropy plus half the penalty times the squared weights, in closed form."""
    error_BHC = _logits(features_BD, weight_DHC, bias_HC).softmax(-1).sub_(onehot_BC[:, None])
    error_BHC /= len(features_BD)
    weight_gradient = torch.einsum("bd,bhc->dhc", features_BD, error_BHC) + decay_H[:, None] * weight_DHC
    return weight_gradient, error_BHC.sum(0)


def _gradient_norm(
    features_ND: Tensor, onehot_NC: Tensor, weight_DHC: Tensor, bias_HC: Tensor, decay_H: Tensor
) -> Tensor:
    """Over all rows, `[H]`."""
    total = [torch.zeros_like(weight_DHC), torch.zeros_like(bias_HC)]
    for rows_BD, targets_BC in zip(features_ND.split(ROWS_AT_ONCE), onehot_NC.split(ROWS_AT_ONCE), strict=True):
        share = len(rows_BD) / len(features_ND)
        for part, gradient in zip(total, _gradients(rows_BD, targets_BC, weight_DHC, bias_HC, decay_H), strict=True):
            part += share * gradient
    return (total[0].square().sum((0, 2)) + total[1].square().sum(1)).sqrt()
