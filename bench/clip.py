"""Row `clip`: a training step of the contrastive objective, ViT-B/32 beside a text tower, against open_clip's."""

from functools import partial

from open_clip.loss import ClipLoss
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch import Tensor, nn

from bench.frame import Result, in_turn, rates
from bench.training import BATCH, EOS, PADDED, WORDS, Ours, Pairs, Theirs, hyperparameters, pairs
from mdc.config import PretrainParams

ROUNDS = 3


def open_clip(hyper: PretrainParams, context: int) -> Theirs:
    """open_clip's `CLIP` and `ClipLoss`: ViT-B/32, and a text tower of the width and depth of ours.

    context: tokens that every caption is filled up to.
    """
    vision = CLIPVisionCfg(image_size=hyper.image_size, layers=12, width=768, patch_size=32)
    text = CLIPTextCfg(
        context_length=context,
        vocab_size=WORDS,
        width=hyper.decoder_width,
        heads=hyper.decoder_heads,
        layers=hyper.decoder_depth,
        pool_type="eos",
        eos_id=EOS,
    )
    criterion = ClipLoss()

    def loss(model: nn.Module, batch: Pairs) -> Tensor:
        loss: Tensor = criterion(*model(batch.images_BCHW, batch.tokens_BL))
        return loss

    return Theirs(hyper, CLIP(hyper.embed_dim, vision, text), loss)


def measure() -> list[Result]:
    hyper = hyperparameters("clip")
    batch = pairs(hyper.image_size)
    longest = batch.tokens_BL.shape[1]
    ours, theirs, short = Ours(hyper), open_clip(hyper, PADDED), open_clip(hyper, longest)
    taken = in_turn(
        {
            "ours": partial(ours.step, batch),
            "theirs": partial(theirs.step, batch.padded()),
            "short": partial(short.step, batch),
        },
        ROUNDS,
    )
    own = rates(BATCH, taken["ours"])
    return [
        Result(
            "clip",
            "`objective: clip`, ViT-B/32, text tower of 6 layers, 224 px, batch 32: training step",
            "open_clip `CLIP` and `ClipLoss`",
            "images/s",
            own,
            rates(BATCH, taken["theirs"]),
            aim=1.0,
            compared="one update of the same towers on the same 32 pairs, float32, AdamW (fused) and clipping "
            "included. Theirs has a context of 64 tokens, which open_clip always fills; ours ends with the longest "
            "caption of the batch",
        ),
        Result(
            "clip",
            "the same, both end with the longest caption",
            "the same, its context cut",
            "images/s",
            own,
            rates(BATCH, taken["short"]),
            compared=f"what is left when their model is built for {longest} tokens, the longest caption of this batch",
        ),
    ]
