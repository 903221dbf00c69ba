"""Attentive probe on frozen patch features: one learned query per head looks at the patches, and a linear layer reads.

The form that is usual for encoders whose features lie in the patches (CoCa, arXiv 2205.01917, section 3.3; I-JEPA). The
protocol is that of the linear probe: the learning rate is chosen on held-out training rows, and test is seen once, by a
head trained on all of train. The penalty is fixed: it is AdamW's, of heads that are stopped long before they converge,
and matters little.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdc.draws import derive_seed
from mdc.eval.measures import Labels
from mdc.eval.probe import BATCH, RANKED, Choice, Judged, ProbeResult, held_out, passes_over

# N pictures, P patches, D width, B pictures of a batch, H heads, d width of a head, C classes

HEAD_WIDTH = 64  # at most
PASSES = 20  # see `passes_over`
LEARNING_RATES = (3e-4, 1e-3, 3e-3)  # of AdamW, behind a warm-up and before a cosine
WEIGHT_DECAY = 0.01
CONVERGED = 0.9  # share of the training loss of the last but one fifth of the passes that the last fifth still has


class AttentiveHead(nn.Module):
    """Normalised patches -> keys and values; a learned query attends to the keys; the values it finds are classified.

    Keys and values are never computed. A query times a key is the picture's patch times the query's image under the
    keys' matrix, and a mean of values is the value of the mean patch: as patches do not change, this is the same with a
    fraction of the work.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH) if width % HEAD_WIDTH == 0 else 1
        self.gain_D, self.offset_D = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.query_Hd = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.keys, self.values = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.classes = nn.Linear(width, classes)
        nn.init.normal_(self.query_Hd, std=0.02)
        nn.init.zeros_(self.classes.weight)

    def forward(self, patches_BPD: Tensor) -> Tensor:
        """Logits `[B, C]` of patches with mean 0 and deviation 1, see `_patches`."""
        keys_HdD, values_HdD = (layer.weight.unflatten(0, (self.heads, -1)) for layer in (self.keys, self.values))
        query_HD = torch.einsum("hd,hdD->hD", self.query_Hd, keys_HdD) * self.gain_D * self.query_Hd.shape[1] ** -0.5
        weights_BHP = (patches_BPD @ query_HD.T).transpose(1, 2).softmax(-1)
        found_BHD = (weights_BHP @ patches_BPD) * self.gain_D + self.offset_D
        value_BD = torch.einsum("bhD,hdD->bhd", found_BHD, values_HdD).flatten(1) + self.values.bias
        return self.classes(value_BD)


def attentive_probe(
    train: np.ndarray,
    labels: Labels,
    groups: Sequence[str] | np.ndarray,
    test: np.ndarray,
    classes: int,
    epochs: int,
    holdout: float,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[], object] = lambda: None,
    learning_rates: Sequence[float] = LEARNING_RATES,
) -> ProbeResult:
    """Choose a head on a part of train, and rank the classes of test.

    train: `[N, P, D]`, read a batch at a time. labels: `[N]` classes 0 .. classes - 1. groups: `[N]` names; rows of one
    group are held out together. test: `[M, P, D]`. epochs: passes, 0 = as many as `passes_over` says. on_epoch: called
    after each pass.
    """
    rows = held_out(groups, holdout, derive_seed(seed, "holdout"))
    some, held = np.flatnonzero(~rows), np.flatnonzero(rows)
    tried, _ = _trained(train, labels, some, classes, learning_rates, epochs, seed, device, on_epoch)
    truth_M = torch.from_numpy(labels[held]).to(device)
    logits = [_logits(head, train, held, device) for head in tried]
    judged = Judged(
        np.array([float((each.argmax(1) == truth_M).sum()) for each in logits]),
        np.array([float(F.cross_entropy(each, truth_M, reduction="sum")) for each in logits]),
        len(held),
    )
    lr, accuracy = learning_rates[judged.best], float(judged.accuracy_H[judged.best])
    choice = Choice(lr, WEIGHT_DECAY, len(held), accuracy, judged.beyond(learning_rates), pooling="attention")
    (head,), converged = _trained(train, labels, np.arange(len(train)), classes, [lr], epochs, seed, device, on_epoch)
    ranked_MR = _logits(head, test, np.arange(len(test)), device).topk(min(RANKED, classes)).indices
    return ProbeResult(ranked_MR.cpu().numpy(), choice, len(train), converged)


def _trained(
    features: np.ndarray,
    labels: Labels,
    rows: Labels,
    classes: int,
    learning_rates: Sequence[float],
    epochs: int,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[], object],
) -> tuple[list[AttentiveHead], bool]:
    """A head for each learning rate, all on the same batches; and whether their loss hardly fell at the end."""
    heads, epochs = [], passes_over(len(rows), epochs, PASSES)
    for _ in learning_rates:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "attentive"))
            heads.append(AttentiveHead(features.shape[2], classes).to(device))
    optimiser = torch.optim.AdamW(
        [{"params": head.parameters(), "lr": lr} for head, lr in zip(heads, learning_rates, strict=True)],
        weight_decay=WEIGHT_DECAY,
    )
    batches = math.ceil(len(rows) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, list(learning_rates), epochs * batches, pct_start=0.1)
    random = np.random.default_rng(derive_seed(seed, "batches"))
    losses = []
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for some in np.array_split(random.permutation(rows), batches):
            patches_BPD, truth_B = _patches(features, some, device), torch.from_numpy(labels[some]).to(device)
            loss = torch.stack([F.cross_entropy(head(patches_BPD), truth_B) for head in heads]).sum()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.detach()
        losses.append(float(total) / batches)
        on_epoch()
    fifth = max(1, epochs // 5)
    before, after = np.mean(losses[-2 * fifth : -fifth] or losses), np.mean(losses[-fifth:])
    return [head.eval() for head in heads], bool(after >= CONVERGED * before)


@torch.no_grad()
def _logits(head: AttentiveHead, features: np.ndarray, rows: Labels, device: torch.device) -> Tensor:
    """`[M, C]` of some rows."""
    return torch.cat([head(_patches(features, rows[i : i + BATCH], device)) for i in range(0, len(rows), BATCH)])


def _patches(features: np.ndarray, rows: Labels, device: torch.device) -> Tensor:
    """`[B, P, D]`, each patch with mean 0 and deviation 1, in the order of the rows; read in the order of the file."""
    order = np.argsort(rows)
    some = torch.from_numpy(features[rows[order]])[torch.from_numpy(np.argsort(order))].to(device).float()
    return F.layer_norm(some, some.shape[2:])
