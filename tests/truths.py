"""Independent truths about tiny models: sums over all masked sets, all orders, all captions."""

from itertools import combinations, permutations, product
from typing import Any

import torch
from scipy.special import beta, betainc
from torch import Tensor

from mdc.model.captioner import Captioner


def set_losses(model: Captioner, image_1CHW: Tensor, caption: list[int]) -> dict[tuple[int, ...], Tensor]:
    """For each non-empty set of masked places, the cross-entropy at each of them, by one plain forward pass."""
    config, N = model.config, len(caption)
    losses = {}
    for size in range(1, N + 1):
        for places in combinations(range(N), size):
            inputs_1L = torch.tensor([caption])
            inputs_1L[0, list(places)] = config.vocabulary.mask_id
            logits_NV = model(image_1CHW, inputs_1L, torch.tensor(places))
            losses[places] = -logits_NV.log_softmax(1)[range(size), [caption[i] for i in places]]
    return losses


def closed_form(losses: dict[tuple[int, ...], Tensor], N: int, low: float, high: float) -> Tensor:
    """The diffusion loss of one caption: each masked set weighs the mean over t of t^(|S|-1) (1-t)^(N-|S|)."""
    total = torch.zeros(())
    for places, loss_S in losses.items():
        a, b = len(places), N - len(places) + 1
        weight = beta(a, b) * (betainc(a, b, high) - betainc(a, b, low)) / (high - low)
        total = total + weight * loss_S.sum()
    return total


def mean_over_orders(losses: dict[tuple[int, ...], Tensor], N: int) -> float:
    """The chain rule's negative log-likelihood, averaged over all N! orders of revealing tokens."""
    totals = []
    for order in permutations(range(N)):
        hidden, total = set(range(N)), 0.0
        for place in order:
            places = tuple(sorted(hidden))
            total += float(losses[places][places.index(place)])
            hidden.remove(place)
        totals.append(total)
    return sum(totals) / len(totals)


def all_captions(words: list[int], length: int, eos: int) -> Tensor:
    """Every caption of `length` tokens, the end token included."""
    return torch.tensor([[*inner, eos] for inner in product(words, repeat=length - 1)])


class KnowingDecoder(torch.nn.Module):
    """A decoder that knows a distribution over captions of one length: its states are log-probabilities."""

    def __init__(self, captions_CL: Tensor, p_C: Tensor, vocabulary: int, mask_id: int) -> None:
        super().__init__()
        self.captions_CL, self.p_C, self.size, self.mask_id = captions_CL, p_C, vocabulary, mask_id

    def keys(self, patches_MPD: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(patches_MPD, patches_MPD)]

    def forward(self, tokens_BL: Tensor, keys: Any, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        fits_BCL = (tokens_BL[:, None] == self.captions_CL) | (tokens_BL == self.mask_id)[:, None]
        p_BC = fits_BCL.all(2) * self.p_C
        one_hot_CLV = torch.nn.functional.one_hot(self.captions_CL, self.size).float()
        p_BLV = torch.einsum("bc,clv->blv", p_BC, one_hot_CLV)
        return (p_BLV / p_BLV.sum(-1, keepdim=True)).log()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND.clone()


class KnowingModel(Captioner):
    """A captioner that predicts from the true conditionals of a distribution, whatever the image."""

    def __init__(self, config: Any, captions_CL: Tensor, p_C: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.config = config
        self.decoder = KnowingDecoder(captions_CL, p_C, config.vocabulary.size, config.vocabulary.mask_id)
        self.null_D = None

    def forward(
        self,
        images_BCHW: Tensor,
        tokens_BL: Tensor,
        positions_N: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        dropped_B: Tensor | None = None,
    ) -> Tensor:
        return self.decoder(tokens_BL, None).flatten(0, 1)[positions_N]


def knowing_model(config: Any, seed: int = 0) -> KnowingModel:
    """A model that knows a random, correlated distribution over captions of 3 word tokens and the end token."""
    captions_CL = all_captions([5, 6, 7], length=4, eos=3)
    weights_C = torch.rand(len(captions_CL), generator=torch.Generator().manual_seed(seed)) ** 6
    return KnowingModel(config, captions_CL, weights_C / weights_C.sum())
