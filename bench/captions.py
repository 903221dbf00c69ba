"""Row `captions`: captions written a second, against Hugging Face's `generate` on a model of the same sizes."""

from typing import Any

import torch
from transformers import GenerationConfig

from bench.frame import Result, in_turn, rates
from bench.hugging_face import hugging_face
from bench.training import BOS, EOS, PAD, Ours, hyperparameters
from mdc.generate import generate
from mdc.model.captioner import Captioner

ROUNDS, IMAGES, LENGTH, AT_ONCE = 3, 16, 16, 4


def measure() -> list[Result]:
    hyper = hyperparameters()
    masked = Ours(hyper).model.eval()
    causal = Ours(hyperparameters("autoregressive")).model.eval()
    theirs_model: Any = hugging_face(hyper).model.eval()
    theirs_model.generation_config = GenerationConfig(
        decoder_start_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
        do_sample=False,
        num_beams=1,
    )
    generator = torch.Generator().manual_seed(0)
    images_MCHW = torch.randn(IMAGES, 3, hyper.image_size, hyper.image_size, generator=generator)
    lengths: dict[str, torch.Tensor] = {}

    def write(name: str, model: torch.nn.Module, steps: int | None) -> None:
        assert isinstance(model, Captioner)
        with torch.no_grad():
            made = generate(model, model.config, model.encode(images_MCHW), LENGTH, steps=steps)
        lengths[name] = (made.tokens_ML != model.config.vocabulary.pad_id).sum(1)

    def theirs() -> None:
        with torch.no_grad():
            made = theirs_model.generate(pixel_values=images_MCHW)
        lengths["theirs"] = torch.full((IMAGES,), made.shape[1] - 1)  # without the first, which is given

    steps = -(-(LENGTH - 1) // AT_ONCE)
    taken = in_turn(
        {
            "confidence": lambda: write("confidence", masked, steps),
            "autoregressive": lambda: write("autoregressive", causal, None),
            "theirs": theirs,
        },
        ROUNDS,
    )
    assert all((each == LENGTH).all() for each in lengths.values()), f"captions of other lengths: {lengths}"

    def result(side: str, work: str, aim: float, compared: str) -> Result:
        return Result(
            "captions",
            work,
            "Hugging Face `generate`, greedy, `VisionEncoderDecoderModel`",
            "captions/s",
            rates(IMAGES, taken[side]),
            rates(IMAGES, taken["theirs"]),
            aim=aim,
            compared=compared,
        )

    return [
        result(
            "confidence",
            f"captions of {LENGTH} tokens, {AT_ONCE} unmasked at a time, ViT-B/32 + 6 layers, batch {IMAGES}",
            2.0,
            f"{steps} passes of the decoder over all places, against {LENGTH} passes of one place each with a cache; "
            "encoding included, random weights",
        ),
        result("autoregressive", "the same, left to right with a cache", 1.0, "the same work as theirs"),
    ]
