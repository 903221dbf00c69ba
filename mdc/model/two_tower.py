"""An image tower and a text tower that meet in one space: the model of `clip` and `siglip`.

Letters: B batch, C channels, H W image size, P patches, L tokens, D width, E width of the shared space.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdc.config import ModelConfig
from mdc.model.decoder import INIT_STD, Decoder
from mdc.model.encoder import build_encoder


class TwoTower(nn.Module):
    """The same encoder as the captioner's, and a text tower of the decoder's size. `config` rebuilds it.

    The image feature is projected from the mean of the patches, the caption's from its last token, which has read the
    others causally (CLIP). scale: the learned inverse temperature at the start. bias: SigLIP's learned bias at the
    start, None for a model without. max_scale: the cap of the scale.
    """

    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, scale: float, bias: float | None, max_scale: float) -> None:
        super().__init__()
        pretrain = config.pretrain
        self.config = config
        self.max_scale = max_scale
        self.encoder = build_encoder(pretrain)
        self.text = Decoder(
            config.vocabulary.size,
            config.max_tokens,
            pretrain.decoder_width,
            pretrain.decoder_depth,
            pretrain.decoder_heads,
            memory_width=None,
        )
        self.image_projection = nn.Linear(self.encoder.width, pretrain.embed_dim, bias=False)
        self.text_projection = nn.Linear(pretrain.decoder_width, pretrain.embed_dim, bias=False)
        for projection in (self.image_projection, self.text_projection):
            nn.init.normal_(projection.weight, std=INIT_STD)
        # one number each, but as vectors: FSDP shards along the first dimension
        self.log_scale = nn.Parameter(torch.tensor([math.log(scale)]))
        self.bias = None if bias is None else nn.Parameter(torch.tensor([bias]))

    def blocks(self) -> list[nn.Module]:
        """The layers that can be sharded, recomputed or compiled one by one, in order."""
        return [*self.encoder.blocks(), *self.text.blocks]

    @torch.no_grad()
    def constrain(self) -> None:
        """Cap the scale, after an update: inside the graph a cap would end its gradient and leave it stuck there."""
        self.log_scale.clamp_(max=math.log(self.max_scale))

    def encode(self, images_BCHW: Tensor, layer: int | None = None) -> Tensor:
        """Patch features `[B, P, D]` of normalised images. layer: a block of the encoder; None = the last."""
        return self.encoder(images_BCHW, layer)

    def image_features(self, patches_BPD: Tensor) -> Tensor:
        """`[B, E]` of length 1."""
        return F.normalize(self.image_projection(patches_BPD.mean(1)).float(), dim=-1)

    def text_features(self, tokens_BL: Tensor, last_B: Tensor) -> Tensor:
        """`[B, E]` of length 1. last_B: where each caption ends."""
        hidden_BLD = self.text(tokens_BL, memory=None, is_causal=True)
        ends_BD = hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
        return F.normalize(self.text_projection(ends_BD).float(), dim=-1)

    def forward(
        self, images_BCHW: Tensor, tokens_BL: Tensor, last_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Image features, text features, scale and bias."""
        image_BE = self.image_features(self.encode(images_BCHW))
        return image_BE, self.text_features(tokens_BL, last_B), self.log_scale.exp(), self.bias
