"""An image encoder under a caption decoder: the model of every captioning objective.

Letters: B batch, C channels, H W image size, P patches, L tokens, D width, V vocabulary, N chosen positions.
"""

import torch
from torch import Tensor, nn

from mdc.config import ModelConfig
from mdc.model.decoder import Decoder, KeyValue
from mdc.model.encoder import build_encoder


class Captioner(nn.Module):
    """Encoder and decoder. `config` rebuilds it.

    With `image_drop` above 0 it has a learned vector that stands in for every patch of a dropped image, which is what
    classifier-free guidance takes as "no image".
    """

    null_D: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        pretrain, vocabulary = config.pretrain, config.vocabulary
        self.config = config
        self.encoder = build_encoder(pretrain)
        self.decoder = Decoder(
            vocabulary.size,
            config.max_tokens,
            pretrain.decoder_width,
            pretrain.decoder_depth,
            pretrain.decoder_heads,
            self.encoder.width,
            never=(vocabulary.pad_id, vocabulary.bos_id, vocabulary.mask_id),
        )
        self.null_D = nn.Parameter(torch.zeros(self.encoder.width)) if pretrain.image_drop > 0 else None

    def blocks(self) -> list[nn.Module]:
        """The layers that can be sharded, recomputed or compiled one by one, in order."""
        return [*self.encoder.blocks(), *self.decoder.blocks]

    def encode(self, images_BCHW: Tensor, layer: int | None = None) -> Tensor:
        """Patch features `[B, P, D]` of normalised images. layer: a block of the encoder; None = the last."""
        return self.encoder(images_BCHW, layer)

    def forward(
        self,
        images_BCHW: Tensor,
        tokens_BL: Tensor,
        positions_N: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        dropped_B: Tensor | None = None,
    ) -> Tensor:
        """Logits `[N, V]` at the positions `b * L + l` of the decoder's input.

        mask, is_causal: from `decoder.attention_mask`. dropped_B: rows that are decoded without their image.
        """
        patches_BPD = self.encode(images_BCHW)
        if dropped_B is not None:
            assert self.null_D is not None, "images are dropped only where image_drop is above 0"
            patches_BPD = torch.where(dropped_B[:, None, None], self.null_D.to(patches_BPD.dtype), patches_BPD)
        hidden_BLD = self.decoder(tokens_BL, patches_BPD, mask, is_causal)
        return self.decoder.logits(hidden_BLD.flatten(0, 1).index_select(0, positions_N))

    def null_keys(self) -> list[KeyValue] | None:
        """Cross-attention keys of "no image", for one image; None for a model trained without dropping.

        One null patch stands for P of them: attention over equal keys gives their one value.
        """
        return None if self.null_D is None else self.decoder.keys(self.null_D[None, None])
