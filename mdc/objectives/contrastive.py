"""The contrastive objectives: every caption of the global batch is a negative for every other image.

A rank computes the rows of its own images against the captions of all ranks (and for `clip` the other way round), so
that the sums over ranks add up to the loss of the global batch, and gradients flow back through the gather.

Letters: B pairs of this rank, G pairs of all ranks, E width of the shared space.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdc import dist
from mdc.config import ModelConfig
from mdc.draws import Draws
from mdc.model.two_tower import TwoTower
from mdc.objectives import scoring
from mdc.objectives.base import Objective, TextImage, config_of


def _own_columns(count: int, device: torch.device) -> Tensor:
    """Where this rank's `count` pairs stand among those of all ranks."""
    return dist.rank() * count + torch.arange(count, device=device)


def clip_loss(image_BE: Tensor, text_BE: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Symmetric InfoNCE (Radford et al. 2021, arXiv 2103.00020), summed over this rank's pairs."""
    targets_B = _own_columns(len(image_BE), image_BE.device)
    to_text_BG = scale * image_BE @ dist.all_gather(text_BE).T
    to_image_BG = scale * text_BE @ dist.all_gather(image_BE).T
    both = [F.cross_entropy(logits_BG, targets_B, reduction="sum") for logits_BG in (to_text_BG, to_image_BG)]
    return (both[0] + both[1]) / 2


def siglip_loss(image_BE: Tensor, text_BE: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Pairwise sigmoid loss (Zhai et al. 2023, arXiv 2303.15343), summed over this rank's images."""
    assert bias is not None, "siglip learns a bias"
    logits_BG = scale * image_BE @ dist.all_gather(text_BE).T + bias
    signs_BG = torch.full_like(logits_BG, -1.0)
    rows_B = torch.arange(len(image_BE), device=image_BE.device)
    signs_BG[rows_B, _own_columns(len(image_BE), image_BE.device)] = 1.0
    return -F.logsigmoid(signs_BG * logits_BG).sum()


@dataclass(frozen=True)
class Contrastive(Objective):
    """pair_loss: sum over this rank's pairs. scale, bias: of the logits at the start. capped: by `max_logit_scale`."""

    pair_loss: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    scale: float
    bias: float | None = None
    capped: bool = False

    def build(self, config: ModelConfig) -> nn.Module:
        return TwoTower(config, self.scale, self.bias, config.pretrain.max_logit_scale if self.capped else math.inf)

    def loss(self, model: nn.Module, inputs: TextImage, draws: Draws | torch.Generator) -> tuple[Tensor, Tensor]:
        """Every rank must call it at the same time, with equally many pairs. Nothing is drawn."""
        device = inputs.images_BCHW.device
        last_B = scoring.last_positions(inputs.tokens_BL, config_of(model).vocabulary.pad_id)
        tokens_BL, count = dist.to_device(inputs.tokens_BL, device), torch.full((), float(len(last_B)), device=device)
        features = model(inputs.images_BCHW, tokens_BL, dist.to_device(last_B, device))
        with torch.autocast(device.type, enabled=False):  # a temperature of 100 asks for more than bfloat16's digits
            return self.pair_loss(*features), count

    def constrain(self, model: nn.Module) -> None:
        assert isinstance(model, TwoTower)
        model.constrain()

    def score(self, model: nn.Module, images_BCHW: Tensor, tokens_BL: Tensor, seed: int = 0) -> Tensor:
        return scoring.score_pairs(model, images_BCHW, tokens_BL, seed)
