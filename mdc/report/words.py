"""What the report calls things, in plain words."""

from mdc.config import CONTRASTIVE

OBJECTIVES = {
    "mdc": "by filling in masked words of their captions, at a random masking ratio (masked diffusion captioning)",
    "cmlm": "by filling in masked words of their captions, at a random masking ratio and without the weight 1/t",
    "bert": "by filling in masked words of their captions, at a fixed masking ratio",
    "autoregressive": "by writing their captions word by word",
    "cappa": "by writing their captions, partly word by word and partly all words at once",
    "clip": "by telling which caption belongs to which picture (softmax over the batch)",
    "siglip": "by telling which caption belongs to which picture (a sigmoid for every pair)",
}

SCORERS = {
    "mc": "a Monte Carlo estimate of a bound on the caption's log-likelihood, in nats; both captions are masked alike",
    "heuristic": "the pseudo-log-likelihood in nats: every token masked alone",
    "unmask": "the log-likelihood in nats under unmasking in order of confidence",
    "autoregressive": "the log-likelihood in nats, word by word",
    "cosine": "the cosine between picture and caption",
}

SAMPLERS = {
    "confidence": "unmasking the most certain position first",
    "ancestral": "the reverse of masked diffusion",
    "autoregressive": "writing word by word",
}

SPLITS = {
    "train": "training",
    "validation": "validation",
    "test": "test",
    "held-out": "validation or test",
    "all": "training, validation or test",
}

_WITHIN = {
    "Untrained encoder": "the untrained encoder",
    "Raw pixels": "raw pixels",
    "Most frequent class": "always naming the most frequent class",
}
_FLOORS = {"untrained": "over the untrained encoder", "pixels": "over raw pixels"}


def loss_unit(objective: str) -> str:
    """What one unit of the training loss is."""
    return "nats per picture" if objective in CONTRASTIVE else "nats per token"


def loss_note(objective: str) -> str:
    """How to read the loss curve."""
    weighted = ", each caption weighted by 1/t" if objective == "mdc" else ""
    return (
        f"Loss in {loss_unit(objective)}{weighted}; lower is better. Validation measures pictures that training never "
        "showed."
    )


def within(name: str) -> str:
    """A name of features as it reads inside a sentence."""
    return _WITHIN.get(name, name)


def floor(features: str) -> str:
    return _FLOORS.get(features, f"over {features}")


def sentence(note: str) -> str:
    """A note as a sentence of its own."""
    return f"{note[:1].upper()}{note[1:]}." if note else "The evaluation made none."


def reason(code: str) -> str:
    """A reason as the stages code it, such as `failed:too_large`, in words."""
    return code.removeprefix("failed:").removeprefix("dropped:").replace("_", " ")


def score(scorer: str, draws: int) -> str:
    """How two captions of a picture were scored."""
    return SCORERS[scorer] + (f" ({draws} draws)" if scorer == "mc" else "")
