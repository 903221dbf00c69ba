"""Attentive probe on frozen patch features: one learned query per head looks at the patches, and a linear layer reads.

The form that is usual for encoders whose features lie in the patches (CoCa, arXiv 2205.01917, section 3.3; I-JEPA). The
protocol is that of the linear probe: learning rate and weight decay are chosen on held-out training rows, and test is
seen once, by a head trained on all of train.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdc.draws import derive_seed
from mdc.eval.measures import Labels
from mdc.eval.probe import RANKED, Choice, ProbeResult, held_out

# N pictures, P patches, D width, B pictures of a batch, H heads, d width of a head, C classes

BATCH = 256  # pictures per update
HEAD_WIDTH = 64  # at most
CONVERGED = 0.9  # share of the training loss of the last but one fifth of the passes that the last fifth still has


class AttentiveHead(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH) if width % HEAD_WIDTH == 0 else 1
        self.norm = nn.LayerNorm(width)
        self.query_HD = nn.Parameter(torch.zeros(self.heads, width // self.heads))
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.classes = nn.Linear(width, classes)
        nn.init.normal_(self.query_HD, std=0.02)
        nn.init.zeros_(self.classes.weight)

    def forward(self, patches_BPD: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        B, P, D = patches_BPD.shape
        x_BPD = self.norm(patches_BPD)
        k_BHPd, v_BHPd = (layer(x_BPD).view(B, P, self.heads, -1).transpose(1, 2) for layer in (self.keys, self.values))
        q_BH1d = self.query_HD[None, :, None].expand(B, -1, -1, -1)
        return self.classes(F.scaled_dot_product_attention(q_BH1d, k_BHPd, v_BHPd).reshape(B, D))


def attentive_probe(
    train: np.ndarray,
    labels: Labels,
    groups: Sequence[str],
    test: np.ndarray,
    classes: int,
    learning_rates: Sequence[float],
    weight_decays: Sequence[float],
    epochs: int,
    holdout: float,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[], object] = lambda: None,
) -> ProbeResult:
    """train: `[N, P, D]`, read a batch at a time. The rest is as in `mdc.eval.probe.linear_probe`."""
    held = held_out(groups, holdout, derive_seed(seed, "holdout"))
    choices = []
    for lr, decay in product(learning_rates, weight_decays):
        head, _ = _trained(train, labels, np.flatnonzero(~held), classes, lr, decay, epochs, seed, device, on_epoch)
        found = _ranked(head, train, np.flatnonzero(held), device)[:, 0]
        choices.append(Choice(lr, decay, int(held.sum()), float((found == labels[held]).mean())))
    best = max(choices, key=lambda choice: choice.accuracy)
    everything = np.arange(len(train))
    head, converged = _trained(
        train, labels, everything, classes, best.lr, best.weight_decay, epochs, seed, device, on_epoch
    )
    rates = sorted(learning_rates)
    return ProbeResult(
        ranked=_ranked(head, test, np.arange(len(test)), device),
        lr=best.lr,
        weight_decay=best.weight_decay,
        holdout=best.holdout,
        holdout_accuracy=best.accuracy,
        grid_edge=len(rates) > 2 and best.lr in (rates[0], rates[-1]),
        converged=converged,
    )


def _trained(
    features: np.ndarray,
    labels: Labels,
    rows: Labels,
    classes: int,
    lr: float,
    decay: float,
    epochs: int,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[], object],
) -> tuple[AttentiveHead, bool]:
    """A head, and whether its loss hardly fell any more at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "attentive"))
        head = AttentiveHead(features.shape[2], classes).to(device)
    optimiser = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=decay)
    batches = max(1, len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, epochs * batches, pct_start=0.1)
    random = np.random.default_rng(derive_seed(seed, "batches"))
    losses = []
    for _ in range(epochs):
        total = 0.0
        for some in np.array_split(random.permutation(rows), batches):
            loss = F.cross_entropy(head(_patches(features, some, device)), torch.from_numpy(labels[some]).to(device))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach())
        losses.append(total / batches)
        on_epoch()
    fifth = max(1, epochs // 5)
    before, after = np.mean(losses[-2 * fifth : -fifth] or losses), np.mean(losses[-fifth:])
    return head.eval(), bool(after >= CONVERGED * before)


@torch.no_grad()
def _ranked(head: AttentiveHead, features: np.ndarray, rows: Labels, device: torch.device) -> Labels:
    """The likeliest classes of some rows, likeliest first."""
    parts = [head(_patches(features, rows[i : i + BATCH], device)) for i in range(0, len(rows), BATCH)]
    logits_NC = torch.cat(parts)
    return logits_NC.topk(min(RANKED, logits_NC.shape[1])).indices.cpu().numpy()


def _patches(features: np.ndarray, rows: Labels, device: torch.device) -> Tensor:
    """In the order of the rows; they are read in the order of the file."""
    order = np.argsort(rows)
    some = torch.from_numpy(features[rows[order]]).float()
    return some[torch.from_numpy(np.argsort(order))].to(device)
