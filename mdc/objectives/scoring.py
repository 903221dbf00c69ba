"""How well a caption fits an image (METHOD section 4). One call scores M images against K captions each.

Larger is better, in nats for likelihoods. The patch features come from outside and the cross-attention keys are
computed once per image. Random numbers are common to all captions of an image. Memory is bounded: captions are taken
in chunks, and so are logits.

The exact scores are normalised over the captions that can exist: padding, [BOS] and [MASK] never occur in one, and
[EOS] ends it. `autoregressive` decides the length by where [EOS] comes. `unmask` is given the length, so [EOS] stands
at the last place from the start and nowhere else, and the probabilities of all captions of one length sum to 1.

Letters: M images, K captions of each, R rows of each, B = M x R rows, P patches, D width, L tokens, V vocabulary,
N positions, S draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mdc.config import CAUSAL, CONTRASTIVE, ModelConfig, choose
from mdc.draws import Draws
from mdc.errors import UserError
from mdc.model.captioner import Captioner
from mdc.model.decoder import KeyValue, attention_mask
from mdc.model.two_tower import TwoTower
from mdc.objectives import corrupt
from mdc.objectives.base import config_of, unwrapped

MASKED = ("mdc", "cmlm", "bert")  # objectives whose models read captions with some tokens masked
TOKENS_AT_ONCE = 1 << 14  # in one call of the decoder
LOGITS_AT_ONCE = 1 << 24  # numbers in one block of logits

Seeds = int | Sequence[int]  # one for all images, or one per image


@dataclass(frozen=True)
class Scores:
    """value_MK: larger is better. stderr_MK: standard error of the value, 0 where it is exact."""

    value_MK: Tensor
    stderr_MK: Tensor


@dataclass(frozen=True)
class Request:
    """What a scorer is asked: captions `[M, K, L]` on the host, a seed per image or one for all, and S draws."""

    config: ModelConfig
    tokens_MKL: Tensor
    seeds: Seeds
    draws: int

    @property
    def real_MKL(self) -> Tensor:
        return self.tokens_MKL != self.config.vocabulary.pad_id


@dataclass
class PairedDraws(Draws):
    """Draws for rows laid out as images x captions x draws: the captions of an image see the same numbers."""

    images: list[Draws] | None = None  # one per image, or one that serves all
    captions: int = 1
    draws: int = 1

    @classmethod
    def of(cls, seeds: Seeds, stream: str, captions: int, draws: int, width: int) -> "PairedDraws":
        each = [seeds] if isinstance(seeds, int) else list(seeds)
        images = [Draws.at(seed, stream, width=width) for seed in each]
        return cls(images[0].generator, width=width, images=images, captions=captions, draws=draws)

    def _spread(self, rows: int, draw: Callable[[Draws], Tensor]) -> Tensor:
        assert self.images is not None
        each_US = torch.stack([draw(image) for image in self.images])
        count = rows // (self.captions * self.draws)
        tail = each_US.shape[2:]
        each_MKS = each_US[:, None].expand(count, self.captions, self.draws, *tail)
        return each_MKS.reshape(rows, *tail)

    def uniform(self, rows: int, columns: int | None = None) -> Tensor:
        return self._spread(rows, lambda image: image.uniform(self.draws, columns))

    def stratified(self, rows: int) -> Tensor:
        return self._spread(rows, lambda image: image.stratified(self.draws))


def last_positions(tokens_BL: Tensor, pad_id: int) -> Tensor:
    """The index of each caption's last token; 0 for a row of padding."""
    return ((tokens_BL != pad_id).sum(1) - 1).clamp(min=0)


def hidden_states(
    model: Captioner, keys: list[KeyValue], inputs_BL: Tensor, chosen_BL: Tensor, causal_B: Tensor
) -> Tensor:
    """The decoder's states `[N, D]` at the chosen positions, on the device of the keys.

    inputs_BL: on the host, padded at the end; the rows of one image follow each other.
    """
    device = keys[0][0].device
    mask, is_causal = attention_mask(inputs_BL != model.config.vocabulary.pad_id, causal_B)
    hidden_BLD = model.decoder(inputs_BL.to(device), keys, None if mask is None else mask.to(device), is_causal)
    return hidden_BLD.flatten(0, 1)[chosen_BL.flatten().nonzero().squeeze(1).to(device)]


def blocks(x_N: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """`x_N` in pieces whose logits fit the bound."""
    return x_N.split(max(1, LOGITS_AT_ONCE // vocabulary))


def inner_log_probabilities(model: Captioner, hidden_ND: Tensor) -> Tensor:
    """Log-probabilities `[N, V]` at masked positions before a caption's end, where [EOS] cannot stand."""
    logits_NV = model.decoder.logits(hidden_ND).float()
    logits_NV[:, model.config.vocabulary.eos_id] = -torch.inf
    return logits_NV.log_softmax(1)


def log_probabilities(
    model: Captioner, keys: list[KeyValue], inputs_BL: Tensor, targets_BL: Tensor, chosen_BL: Tensor, causal_B: Tensor
) -> Tensor:
    """`log p(target)` at the chosen positions and 0 elsewhere, `[B, L]` on the host."""
    size = model.config.vocabulary.size
    hidden_ND = hidden_states(model, keys, inputs_BL, chosen_BL, causal_B)
    targets_N = targets_BL[chosen_BL].to(hidden_ND.device)
    found = []
    for hidden_nD, targets_n in zip(blocks(hidden_ND, size), blocks(targets_N, size), strict=True):
        logits_nV = model.decoder.logits(hidden_nD).float()
        found.append(logits_nV.gather(1, targets_n[:, None]).squeeze(1) - logits_nV.logsumexp(1))
    result_BL = torch.zeros(inputs_BL.shape)
    result_BL[chosen_BL] = torch.cat(found).cpu()
    return result_BL


def _in_chunks(
    model: Captioner,
    patches_MPD: Tensor,
    request: Request,
    rows_per_caption: int,
    chunk_score: Callable[[list[KeyValue], Tensor, Seeds], Tensor],
) -> Tensor:
    """Score captions chunk by chunk: `[M, K, ...]` from `chunk_score(keys of m images, tokens_mkL, seeds of m)`."""
    M, K, L = request.tokens_MKL.shape
    captions = max(1, min(K, TOKENS_AT_ONCE // (rows_per_caption * L)))
    images = max(1, min(M, TOKENS_AT_ONCE // (rows_per_caption * L * captions)))
    parts = []
    for m in range(0, M, images):
        keys = model.decoder.keys(patches_MPD[m : m + images])
        seeds = request.seeds if isinstance(request.seeds, int) else request.seeds[m : m + images]
        row = [
            chunk_score(keys, request.tokens_MKL[m : m + images, k : k + captions], seeds)
            for k in range(0, K, captions)
        ]
        parts.append(torch.cat(row, dim=1))
    return torch.cat(parts)


def _exact(value_MK: Tensor) -> Scores:
    return Scores(value_MK, torch.zeros_like(value_MK))


def monte_carlo(model: Captioner, patches_MPD: Tensor, request: Request) -> Scores:
    """Minus the diffusion loss of METHOD section 2, estimated by draws of t and mask; t is stratified over the draws.

    The interval of t is that of the configuration: on [0, 1] the value is the evidence lower bound, else its
    counterpart on the interval. The standard error is taken as if the draws were independent; since t is spread
    evenly over them, the true error is rather smaller.
    """
    config, p, S = request.config, request.config.pretrain, request.draws
    corruption = partial(corrupt.diffusion, t_min=p.t_min, t_max=p.t_max, t_floor=p.t_floor)

    def chunk_score(keys: list[KeyValue], tokens_MKL: Tensor, seeds: Seeds) -> Tensor:
        M, K, L = tokens_MKL.shape
        tokens_BL = tokens_MKL[:, :, None].expand(M, K, S, L).reshape(-1, L)
        draws = PairedDraws.of(seeds, "score", K, S, config.max_tokens)
        inputs_BL, weights_BL, causal_B = corruption(
            tokens_BL, config.vocabulary.pad_id, config.vocabulary.mask_id, draws
        )
        log_BL = log_probabilities(model, keys, inputs_BL, tokens_BL, weights_BL > 0, causal_B)
        return (weights_BL * log_BL).sum(1).view(M, K, S)

    values_MKS = _in_chunks(model, patches_MPD, request, S, chunk_score)
    return Scores(values_MKS.mean(2), values_MKS.std(2) / S**0.5)


def heuristic(model: Captioner, patches_MPD: Tensor, request: Request) -> Scores:
    """The pseudo-log-likelihood: each token masked alone, log-probabilities summed."""
    vocabulary = request.config.vocabulary

    def chunk_score(keys: list[KeyValue], tokens_MKL: Tensor, seeds: Seeds) -> Tensor:
        M, K, L = tokens_MKL.shape
        tokens_MKLL = tokens_MKL[:, :, None].expand(M, K, L, L)
        alone_MKLL = torch.eye(L, dtype=torch.bool) & (tokens_MKLL != vocabulary.pad_id)
        tokens_BL, alone_BL = tokens_MKLL.reshape(-1, L), alone_MKLL.reshape(-1, L)
        inputs_BL = tokens_BL.masked_fill(alone_BL, vocabulary.mask_id)
        causal_B = torch.zeros(len(tokens_BL), dtype=torch.bool)
        return log_probabilities(model, keys, inputs_BL, tokens_BL, alone_BL, causal_B).view(M, K, -1).sum(2)

    return _exact(_in_chunks(model, patches_MPD, request, request.tokens_MKL.shape[2], chunk_score))


def unmask(model: Captioner, patches_MPD: Tensor, request: Request) -> Scores:
    """The exact log-likelihood under unmasking one token at a time, the surest position first.

    A position's sureness is its largest probability given what is visible. The true token is looked at only when its
    position has been chosen, so the order is the same for all captions that agree on what is visible, and their
    probabilities sum to 1. Of equally sure positions the first is taken.
    """
    vocabulary = request.config.vocabulary

    def chunk_score(keys: list[KeyValue], tokens_MKL: Tensor, seeds: Seeds) -> Tensor:
        M, K, L = tokens_MKL.shape
        tokens_BL = tokens_MKL.reshape(-1, L)
        last_B = last_positions(tokens_BL, vocabulary.pad_id)
        hidden_BL = torch.arange(L) < last_B[:, None]
        rows_B, total_B = torch.arange(len(tokens_BL)), torch.zeros(len(tokens_BL))
        for _ in range(int(last_B.max())):
            inputs_BL = tokens_BL.masked_fill(hidden_BL, vocabulary.mask_id)
            sure_BL, true_BL = _surest(model, keys, inputs_BL, tokens_BL, hidden_BL)
            place_B = sure_BL.argmax(1)
            total_B += true_BL[rows_B, place_B]
            hidden_BL[rows_B, place_B] = False
        return total_B.view(M, K)

    return _exact(_in_chunks(model, patches_MPD, request, 1, chunk_score))


def _surest(
    model: Captioner, keys: list[KeyValue], inputs_BL: Tensor, targets_BL: Tensor, hidden_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """At hidden positions: the largest log-probability (elsewhere minus infinity), and the target's (elsewhere 0)."""
    size = model.config.vocabulary.size
    causal_B = torch.zeros(len(inputs_BL), dtype=torch.bool)
    hidden_ND = hidden_states(model, keys, inputs_BL, hidden_BL, causal_B)
    targets_N = targets_BL[hidden_BL].to(hidden_ND.device)
    largest, true = [], []
    for hidden_nD, targets_n in zip(blocks(hidden_ND, size), blocks(targets_N, size), strict=True):
        log_nV = inner_log_probabilities(model, hidden_nD)
        largest.append(log_nV.amax(1))
        true.append(log_nV.gather(1, targets_n[:, None]).squeeze(1))
    sure_BL, true_BL = torch.full(inputs_BL.shape, -torch.inf), torch.zeros(inputs_BL.shape)
    sure_BL[hidden_BL], true_BL[hidden_BL] = torch.cat(largest).cpu(), torch.cat(true).cpu()
    return sure_BL, true_BL


def autoregressive(model: Captioner, patches_MPD: Tensor, request: Request) -> Scores:
    """The exact causal log-likelihood, the end token included."""
    vocabulary = request.config.vocabulary

    def chunk_score(keys: list[KeyValue], tokens_MKL: Tensor, seeds: Seeds) -> Tensor:
        M, K, L = tokens_MKL.shape
        tokens_BL = tokens_MKL.reshape(-1, L)
        inputs_BL, weights_BL, causal_B = corrupt.shifted(
            tokens_BL, vocabulary.pad_id, vocabulary.mask_id, bos_id=vocabulary.bos_id
        )
        return log_probabilities(model, keys, inputs_BL, tokens_BL, weights_BL > 0, causal_B).sum(1).view(M, K)

    return _exact(_in_chunks(model, patches_MPD, request, 1, chunk_score))


def cosine(model: TwoTower, patches_MPD: Tensor, request: Request) -> Scores:
    """The cosine of image and caption in the shared space."""
    M, K, L = request.tokens_MKL.shape
    pad_id, device = request.config.vocabulary.pad_id, patches_MPD.device
    common = request.tokens_MKL.stride(0) == 0  # expanded from [1, K, L]: read once
    tokens_BL = (request.tokens_MKL[:1] if common else request.tokens_MKL).reshape(-1, L)
    texts = [
        model.text_features(tokens_bL.to(device), last_positions(tokens_bL, pad_id).to(device))
        for tokens_bL in tokens_BL.split(max(1, TOKENS_AT_ONCE // L))
    ]
    text_MKE = torch.cat(texts).view(-1, K, model.config.pretrain.embed_dim).expand(M, -1, -1)
    return _exact(torch.einsum("me,mke->mk", model.image_features(patches_MPD), text_MKE).cpu())


@dataclass(frozen=True)
class Scorer:
    """function: the scorer. objectives: those whose models it fits."""

    function: Callable[..., Scores]
    objectives: Sequence[str]


SCORERS: dict[str, Scorer] = {
    "mc": Scorer(monte_carlo, MASKED),
    "heuristic": Scorer(heuristic, MASKED),
    "unmask": Scorer(unmask, MASKED),
    "autoregressive": Scorer(autoregressive, CAUSAL),
    "cosine": Scorer(cosine, CONTRASTIVE),
}

_DEFAULT = {"mdc": "mc", "cmlm": "mc", "bert": "heuristic"}  # bert has learnt one ratio only, so no range of t


def default_scorer(objective: str) -> str:
    """The scorer that fits an objective best."""
    return _DEFAULT.get(objective) or next(name for name, scorer in SCORERS.items() if objective in scorer.objectives)


@torch.no_grad()
def score(
    model: nn.Module,
    config: ModelConfig,
    patches_MPD: Tensor,
    tokens_MKL: Tensor,
    scorer: str | None = None,
    seed: Seeds = 0,
    draws: int = 32,
) -> Scores:
    """Score K captions against each of M images.

    patches_MPD: from `model.encode`; for the blind control the mean patch features, expanded. tokens_MKL: padded at
    the end, or `[1, K, L]` for captions that are common to all images. seed: of `mc`; one number gives every image
    the same random numbers, a sequence gives each its own, and either way a score does not depend on the batch.
    draws: of `mc`, at least 2. Raises UserError for an unknown scorer or one that does not fit the objective.
    """
    name = scorer or default_scorer(config.pretrain.objective)
    chosen = choose("scorer", name, SCORERS)
    objective = config.pretrain.objective
    if objective not in chosen.objectives:
        fitting = [other for other, s in SCORERS.items() if objective in s.objectives]
        raise UserError(f"scorer {name!r} does not fit a model of objective {objective!r}; take {', '.join(fitting)}")
    if draws < 2:
        raise UserError(f"draws {draws} give no standard error; take at least 2")
    images, (_, captions, length) = len(patches_MPD), tokens_MKL.shape
    if length > config.max_tokens:
        raise UserError(f"captions of {length} tokens are longer than the model's {config.max_tokens}; shorten them")
    if not isinstance(seed, int) and len(seed) != images:
        raise UserError(f"{len(seed)} seeds for {images} images; give one number or one per image")
    tokens_MKL = tokens_MKL.cpu().expand(images, captions, length)
    return chosen.function(unwrapped(model), patches_MPD, Request(config, tokens_MKL, seed, draws))


def score_pairs(model: nn.Module, images_BCHW: Tensor, tokens_BL: Tensor, seed: int = 0) -> Tensor:
    """Each image against its one caption by the objective's own scorer, `[B]` on the host."""
    config, inner = config_of(model), unwrapped(model)
    with torch.no_grad():
        patches_BPD = inner.encode(images_BCHW)  # type: ignore[operator]
    return score(inner, config, patches_BPD, tokens_BL[:, None], seed=seed).value_MK[:, 0]
