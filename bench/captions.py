"""Row `captions`: captions written a second, against Hugging Face's `generate` on a model of the same sizes."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from bench.frame import Result, in_turn, rates
from bench.hugging_face import hugging_face
from bench.training import BOS, EOS, PAD, Ours, hyperparameters
from mdc.generate import generate

ROUNDS, LENGTH, AT_ONCE = 5, 16, 4
BATCHES = {1: 8, 16: 1}  # images at once: how many such batches a round writes
STEPS = -(-(LENGTH - 1) // AT_ONCE)


def _time(batch: int, models: dict[str, Any]) -> dict[str, list[float]]:
    """Captions per second of each side by round. batch: images at once."""
    size = models["confidence"].config.pretrain.image_size
    images_MCHW = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))

    def write(name: str, steps: int | None) -> None:
        model = models[name]
        tokens_ML = generate(model, model.config, model.encode(images_MCHW), LENGTH, steps=steps).tokens_ML
        assert tokens_ML.shape == (batch, LENGTH)
        assert (tokens_ML != PAD).all(), "a caption of another length"

    def theirs() -> None:
        made = models["theirs"].generate(pixel_values=images_MCHW)
        assert made.shape[1] == 1 + LENGTH, "a caption of another length"  # the first token is given

    def often(work: Callable[[], None]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(BATCHES[batch]):
                work()

        return repeat

    sides = {
        "confidence": lambda: write("confidence", STEPS),
        "autoregressive": lambda: write("autoregressive", None),
        "theirs": theirs,
    }
    with torch.no_grad():
        taken = in_turn({name: often(work) for name, work in sides.items()}, ROUNDS)
    return {name: rates(batch * BATCHES[batch], seconds) for name, seconds in taken.items()}


def measure() -> list[Result]:
    hyper = hyperparameters()
    theirs: Any = hugging_face(hyper).model.eval()
    theirs.generation_config = GenerationConfig(
        decoder_start_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
        do_sample=False,
        num_beams=1,
    )
    models = {
        "confidence": Ours(hyper).model.eval(),
        "autoregressive": Ours(hyperparameters("autoregressive")).model.eval(),
        "theirs": theirs,
    }
    one, many = (_time(batch, models) for batch in BATCHES)

    def result(figures: dict[str, list[float]], side: str, work: str, aim: float | None, compared: str) -> Result:
        against = "Hugging Face `generate`, greedy, `VisionEncoderDecoderModel`"
        return Result("captions", work, against, "captions/s", figures[side], figures["theirs"], aim, compared=compared)

    model = "ViT-B/32 + 6 layers"
    return [
        result(
            one,
            "confidence",
            f"a picture at a time: captions of {LENGTH} tokens, {AT_ONCE} unmasked at a time, {model}",
            2.0,
            f"{STEPS} passes of the decoder over all places, against {LENGTH} passes of one place each with a cache; "
            "encoding included, random weights",
        ),
        result(one, "autoregressive", "the same, left to right with a cache", 1.0, "the same work as theirs"),
        result(
            many,
            "confidence",
            f"{max(BATCHES)} pictures at a time, {AT_ONCE} tokens unmasked at a time",
            None,
            f"with many pictures the operations count, not the passes, and the decoder's are {STEPS} times theirs",
        ),
        result(many, "autoregressive", "the same, left to right with a cache", 1.0, "the same work as theirs"),
    ]
