"""k-NN on frozen features: the nearest training rows by cosine vote for their class."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from mdc.eval.index import normalised
from mdc.eval.measures import Labels

TEMPERATURE = 0.07  # of the votes, as in DINO (arXiv 2104.14294): a neighbour counts exp(cosine / temperature)
QUERIES_AT_ONCE = 1024


def knn_predict(
    train: np.ndarray, labels: Labels, test: np.ndarray, classes: int, ks: Sequence[int], device: torch.device | str
) -> dict[int, Labels]:
    """The class of every test row by its k nearest training rows, for each k.

    train: `[N, D]`. labels: `[N]` classes 0 .. classes - 1. test: `[M, D]`. Returns `[M]` classes for each k; where
    there are fewer training rows than k, all of them vote.
    """
    bank_ND = torch.from_numpy(normalised(train, "training features")).to(device)
    onehot_NC = F.one_hot(torch.from_numpy(labels).to(device), classes).float()
    predicted: dict[int, list[Labels]] = {k: [] for k in ks}
    for queries_QD in torch.from_numpy(normalised(test, "test features")).split(QUERIES_AT_ONCE):
        near = (queries_QD.to(device) @ bank_ND.T).topk(min(max(ks), len(bank_ND)))
        votes_QKC = (near.values / TEMPERATURE).exp()[..., None] * onehot_NC[near.indices]
        for k in ks:
            predicted[k].append(votes_QKC[:, :k].sum(1).argmax(-1).cpu().numpy())
    return {k: np.concatenate(parts) for k, parts in predicted.items()}
