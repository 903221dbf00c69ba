"""Row `step`: a training step of the captioner, ViT-B/32 under six decoder layers, against Hugging Face's."""

from functools import partial

from bench.frame import Result, in_turn, rates
from bench.hugging_face import hugging_face
from bench.training import BATCH, SAMPLE_WORDS, WORDS, Ours, hyperparameters, pairs
from mdc.config import ComputeParams

ROUNDS, FEWER = 4, 3
AGAINST = "Hugging Face `VisionEncoderDecoderModel`"
SIDES = {
    "mdc": (
        "captioner ViT-B/32 + 6 layers, 224 px, batch 32: training step",
        "one update of the same sizes on the same 32 pairs, float32, AdamW (fused) and clipping included, dropout off. "
        f"Captions as long as the sample's (at most 12 tokens), of a vocabulary of {WORDS:,}. Theirs is padded to 64 "
        "and reads every position out; ours is padded to the longest of the batch, as mdc's loader leaves it, and "
        "reads out positions that have a loss",
    ),
    "autoregressive": ("the same, `objective: autoregressive`", "the same loss as theirs: every real token, causal"),
    "accumulate": (
        "the same, `accumulate: 8`",
        "the same gradient in eight parts: the setting of the row of that name under `memory`",
    ),
    "checkpointing": (
        "the same, `activation_checkpointing: true`",
        "every layer is computed twice: the setting of the row of that name under `memory`",
    ),
}


def measure() -> list[Result]:
    hyper = hyperparameters()
    batch = pairs(hyper.image_size)
    ours, theirs = Ours(hyper), hugging_face(hyper)
    forgetful = Ours(hyper, compute=ComputeParams(activation_checkpointing=True))
    taken = in_turn(
        {
            "mdc": partial(ours.step, batch),
            "padded": partial(theirs.step, batch.padded()),
            "autoregressive": partial(ours.step, batch, "autoregressive"),
            "short": partial(theirs.step, batch),
            "accumulate": partial(ours.step, batch, accumulate=8),
            "checkpointing": partial(forgetful.step, batch),
        },
        ROUNDS,
    )
    del ours, theirs, forgetful
    small = pairs(hyper.image_size, words=SAMPLE_WORDS)
    fewer = in_turn(
        {
            "mdc": partial(Ours(hyper, SAMPLE_WORDS).step, small),
            "padded": partial(hugging_face(hyper, SAMPLE_WORDS).step, small.padded()),
        },
        FEWER,
    )

    def result(ours: list[float], theirs: list[float], aim: float | None, work: str, compared: str) -> Result:
        return Result(
            "step", work, AGAINST, "images/s", rates(BATCH, ours), rates(BATCH, theirs), aim, compared=compared
        )

    return [
        *(result(taken[side], taken["padded"], 1.4 if side == "mdc" else None, *SIDES[side]) for side in SIDES),
        result(
            fewer["mdc"],
            fewer["padded"],
            None,
            f"the same, a vocabulary of {SAMPLE_WORDS:,}",
            "the sample's own vocabulary: reading out costs them less",
        ),
        result(
            taken["autoregressive"],
            taken["short"],
            None,
            "`objective: autoregressive`, both padded to the longest of the batch",
            "what is left when their captions are cut as ours are and the loss is the same",
        ),
    ]
