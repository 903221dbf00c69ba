"""Row `scoring`: the Monte Carlo score of two captions an image, against a loop of plain forward passes."""

import torch
from torch import Tensor

from bench.frame import Result, in_turn, rates
from bench.training import EOS, MASK, Ours, hyperparameters
from mdc.model.captioner import Captioner
from mdc.objectives import corrupt
from mdc.objectives.scoring import PairedDraws, score

ROUNDS, IMAGES, CAPTIONS, DRAWS, LENGTH = 3, 4, 2, 32, 12


def _inputs(model: Captioner, tokens_MKL: Tensor) -> tuple[Tensor, Tensor]:
    """The masked captions of every draw and the weights of their tokens, `[M, K, S, L]`: those that `score` draws."""
    config, p = model.config, model.config.pretrain
    M, K, L = tokens_MKL.shape
    tokens_BL = tokens_MKL[:, :, None].expand(M, K, DRAWS, L).reshape(-1, L)
    draws = PairedDraws.of(0, "score", K, DRAWS, config.max_tokens)
    inputs_BL, weights_BL, _ = corrupt.diffusion(
        tokens_BL,
        config.vocabulary.pad_id,
        config.vocabulary.mask_id,
        draws,
        t_min=p.t_min,
        t_max=p.t_max,
        t_floor=p.t_floor,
    )
    return inputs_BL.view(M, K, DRAWS, L), weights_BL.view(M, K, DRAWS, L)


def measure() -> list[Result]:
    hyper = hyperparameters()
    model = Ours(hyper).model.eval()
    assert isinstance(model, Captioner)
    generator = torch.Generator().manual_seed(0)
    images_MCHW = torch.randn(IMAGES, 3, hyper.image_size, hyper.image_size, generator=generator)
    tokens_MKL = torch.randint(MASK + 1, 2000, (IMAGES, CAPTIONS, LENGTH), generator=generator)
    tokens_MKL[:, :, -1] = EOS
    values: dict[str, Tensor] = {}

    @torch.no_grad()
    def ours() -> None:
        values["ours"] = score(model, model.config, model.encode(images_MCHW), tokens_MKL, "mc", 0, DRAWS).value_MK

    @torch.no_grad()
    def theirs() -> None:
        inputs_MKSL, weights_MKSL = _inputs(model, tokens_MKL)
        total_MK = torch.zeros(IMAGES, CAPTIONS)
        for m in range(IMAGES):
            for k in range(CAPTIONS):
                for s in range(DRAWS):
                    places_N = weights_MKSL[m, k, s].nonzero().squeeze(1)
                    log_NV = model(images_MCHW[m : m + 1], inputs_MKSL[m, k, s][None], places_N).log_softmax(1)
                    log_N = log_NV.gather(1, tokens_MKL[m, k, places_N][:, None]).squeeze(1)
                    total_MK[m, k] += (weights_MKSL[m, k, s, places_N] * log_N).sum()
        values["theirs"] = total_MK / DRAWS

    taken = in_turn({"ours": ours, "theirs": theirs}, ROUNDS)
    torch.testing.assert_close(values["ours"], values["theirs"], rtol=1e-3, atol=1e-2)
    return [
        Result(
            "scoring",
            f"Monte Carlo score of {CAPTIONS} captions an image, {DRAWS} draws of {LENGTH} tokens, ViT-B/32 + 6 layers",
            "a loop of plain forward passes over the same masks",
            "images/s",
            rates(IMAGES, taken["ours"]),
            rates(IMAGES, taken["theirs"]),
            aim=5.0,
            compared="the encoder and the keys of its patches once an image and all draws in one pass, against one "
            "forward pass of the whole model a draw; both give the same scores",
        )
    ]
