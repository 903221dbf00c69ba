"""The training steps that rows compare: ours from mdc's own parts, theirs from the library's, on the same batch.

B: batch, C: channels, H W: image size, L: tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mdc import dist
from mdc.config import ComputeParams, ModelConfig, PretrainParams, Vocabulary
from mdc.draws import Draws
from mdc.objectives import OBJECTIVES, TextImage
from mdc.train.checkpoint import initial_model
from mdc.train.optim import build_optimizer, scale_and_clip
from mdc.train.strategy import exchange, prepare_layers, spread

BATCH = 32  # images
PADDED = 64  # tokens
PAD, BOS, EOS, MASK = 0, 2, 3, 4
WORDS = 30_000  # tokens that are known: what the README's example for own data trains; BERT has 30,522
SAMPLE_WORDS = 2_000  # of the sample's tokenizer
# Training captions of the sample by length in tokens, the end token included
LENGTHS = {2: 160, 3: 515, 4: 435, 5: 358, 6: 452, 7: 319, 8: 374, 9: 160, 10: 139, 11: 36, 12: 118}


@dataclass(frozen=True)
class Pairs:
    """images_BCHW: normalised floats. tokens_BL: padded to the longest, as mdc's loader leaves them."""

    images_BCHW: Tensor
    tokens_BL: Tensor

    def padded(self, length: int = PADDED) -> "Pairs":
        """The same with every caption filled up to `length` tokens, as tokenizers of a fixed length leave them."""
        missing = length - self.tokens_BL.shape[1]
        return Pairs(self.images_BCHW, nn.functional.pad(self.tokens_BL, (0, missing), value=PAD))


def pairs(size: int, batch: int = BATCH, words: int = WORDS) -> Pairs:
    """Noise for pictures, and captions of random words with lengths drawn from `LENGTHS`. size: pixels."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor(list(LENGTHS.values()), dtype=torch.float32)
    lengths_B = torch.tensor(list(LENGTHS))[torch.multinomial(shares, batch, replacement=True, generator=generator)]
    tokens_BL = torch.randint(MASK + 1, words, (batch, int(lengths_B.max())), generator=generator)
    places_L = torch.arange(tokens_BL.shape[1])
    tokens_BL[places_L == lengths_B[:, None] - 1] = EOS
    tokens_BL[places_L >= lengths_B[:, None]] = PAD
    return Pairs(torch.randn(batch, 3, size, size, generator=generator), tokens_BL)


def hyperparameters(objective: str = "mdc", preset: str = "vit_b32", **changes: Any) -> PretrainParams:
    return PretrainParams.model_validate({"preset": preset, "objective": objective, "lr": 1e-4, **changes})


class Ours:
    """mdc's model and optimiser, and updates as its trainer makes them."""

    def __init__(self, hyper: PretrainParams, words: int = WORDS, compute: ComputeParams | None = None) -> None:
        vocabulary = Vocabulary(size=words, pad_id=PAD, unk_id=1, bos_id=BOS, eos_id=EOS, mask_id=MASK)
        config = ModelConfig(pretrain=hyper, vocabulary=vocabulary, max_tokens=PADDED)
        self.hyper, self.model = hyper, initial_model(config, seed=0)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.model, hyper)
        compute = compute or ComputeParams()
        prepare_layers(self.model, compute)
        self.replica = spread(self.model, compute.strategy, torch.device("cpu"), bf16=False)

    def step(self, batch: Pairs, objective: str = "", accumulate: int = 1) -> float:
        """One update; returns the loss. All ranks take part.

        batch: of all ranks. objective: another of the same model. accumulate: micro-batches.
        """
        chosen, total = OBJECTIVES[objective or self.hyper.objective], len(batch.tokens_BL)
        sums, rows = torch.zeros(2), total // (accumulate * dist.world_size())
        for part in range(accumulate):
            first = (part * dist.world_size() + dist.rank()) * rows
            inputs = TextImage(batch.images_BCHW[first : first + rows], batch.tokens_BL[first : first + rows])
            draws = Draws.at(0, "corruption", first=first, total=total, width=PADDED)
            with exchange(self.replica, last=part == accumulate - 1):
                loss, count = chosen.loss(self.replica, inputs, draws)
                loss.backward()
            sums += torch.stack([loss.detach(), count])
        sums = dist.all_reduce_sum(sums)
        scale_and_clip(self.parameters, dist.world_size() / sums[1], self.hyper.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(sums[0] / sums[1])


class Theirs:
    """Another library's model with torch's clipping and the same AdamW. loss: of the model and a batch."""

    def __init__(self, hyper: PretrainParams, model: nn.Module, loss: Callable[[nn.Module, Pairs], Tensor]) -> None:
        self.hyper, self.model, self.loss = hyper, model.train(), loss
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=hyper.lr, betas=(0.9, hyper.beta2), weight_decay=hyper.weight_decay, fused=True
        )

    def step(self, batch: Pairs) -> float:
        """One update; returns the loss."""
        loss = self.loss(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.hyper.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()
