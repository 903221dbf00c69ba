"""The captioning objectives: corrupt, decode, weighted cross-entropy. They differ by their corruption alone.

Letters: B captions, L tokens, V vocabulary, N positions with a loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdc.config import ModelConfig, Vocabulary
from mdc.dist import to_device
from mdc.draws import Draws, as_draws
from mdc.model.captioner import Captioner
from mdc.model.decoder import attention_mask
from mdc.objectives import corrupt, scoring
from mdc.objectives.base import Objective, TextImage, config_of


def mdc_corruption(config: ModelConfig) -> corrupt.Corruption:
    p = config.pretrain
    return partial(
        corrupt.diffusion, t_min=p.t_min, t_max=p.t_max, t_floor=p.t_floor, stratified=p.stratified_t, reweight=True
    )


def cmlm_corruption(config: ModelConfig) -> corrupt.Corruption:
    p = config.pretrain
    if p.exact_count:
        return partial(corrupt.exact_count, stratified=p.stratified_t)
    return partial(
        corrupt.diffusion, t_min=p.t_min, t_max=p.t_max, t_floor=p.t_floor, stratified=p.stratified_t, reweight=False
    )


def bert_corruption(config: ModelConfig) -> corrupt.Corruption:
    p = config.pretrain
    return partial(
        corrupt.fixed_ratio,
        ratio=p.bert_ratio,
        replacements_R=ordinary_ids(config.vocabulary) if p.bert_80_10_10 else None,
    )


def autoregressive_corruption(config: ModelConfig) -> corrupt.Corruption:
    return partial(corrupt.shifted, bos_id=config.vocabulary.bos_id)


def cappa_corruption(config: ModelConfig) -> corrupt.Corruption:
    return partial(
        corrupt.parallel_or_shifted, bos_id=config.vocabulary.bos_id, parallel=config.pretrain.cappa_parallel
    )


def ordinary_ids(vocabulary: Vocabulary) -> Tensor:
    """The ids that stand for words: no padding, begin, end or mask."""
    special = (vocabulary.pad_id, vocabulary.bos_id, vocabulary.eos_id, vocabulary.mask_id)
    return torch.tensor([i for i in range(vocabulary.size) if i not in special])


@dataclass(frozen=True)
class Captioning(Objective):
    """An objective that reads a corrupted caption and predicts tokens of the true one.

    corruption: binds the options of a configuration to a function of `corrupt`. per: what the loss is divided by, the
    captions' real tokens or the predicted ones (METHOD sections 2 and 3).
    """

    corruption: Callable[[ModelConfig], corrupt.Corruption]
    per: Literal["token", "target"]

    def build(self, config: ModelConfig) -> nn.Module:
        return Captioner(config)

    def loss(self, model: nn.Module, inputs: TextImage, draws: Draws | torch.Generator) -> tuple[Tensor, Tensor]:
        config = config_of(model)
        vocabulary, drop = config.vocabulary, config.pretrain.image_drop
        tokens_BL, device = inputs.tokens_BL, inputs.images_BCHW.device
        draws = as_draws(draws)
        inputs_BL, weights_BL, causal_B = self.corruption(config)(
            tokens_BL, vocabulary.pad_id, vocabulary.mask_id, draws
        )
        real_BL = tokens_BL != vocabulary.pad_id
        mask, is_causal = attention_mask(real_BL, causal_B)
        dropped_B = to_device(draws.uniform(len(tokens_BL)) < drop, device) if drop else None
        positions_N = weights_BL.flatten().nonzero().squeeze(1)
        weights_N = to_device(weights_BL.flatten()[positions_N], device)
        targets_N = to_device(tokens_BL.flatten()[positions_N], device)
        logits_NV = model(
            inputs.images_BCHW,
            to_device(inputs_BL, device),
            to_device(positions_N, device),
            None if mask is None else to_device(mask, device),
            is_causal,
            dropped_B,
        )
        losses_N = F.cross_entropy(logits_NV.float(), targets_N, reduction="none")
        counted = real_BL if self.per == "token" else weights_BL > 0
        return (losses_N * weights_N).sum(), to_device(counted.sum().float(), device)

    def score(self, model: nn.Module, images_BCHW: Tensor, tokens_BL: Tensor, seed: int = 0) -> Tensor:
        return scoring.score_pairs(model, images_BCHW, tokens_BL, seed)
