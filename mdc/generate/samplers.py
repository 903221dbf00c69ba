"""Captions from patch features (METHOD section 5): unmasking in parallel, or one token after the other.

The cross-attention keys are computed once per image. A caption depends on its image, its seed and the options, never
on the batch it is made in. All captions end in [EOS]: with a given length it stands at the last place from the start,
as in the `unmask` score, and the other places hold words; `autoregressive` may end before the given length.

Letters: M images, b beams, B = M x b, P patches, D width, L tokens, V vocabulary, N positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mdc.config import CAUSAL, ModelConfig, choose
from mdc.errors import UserError
from mdc.model.captioner import Captioner
from mdc.model.decoder import Cache, KeyValue
from mdc.objectives.base import unwrapped
from mdc.objectives.scoring import (
    MASKED,
    TOKENS_AT_ONCE,
    PairedDraws,
    Seeds,
    blocks,
    hidden_states,
    inner_log_probabilities,
    score,
)

AUTO_LENGTHS = 8  # how many lengths `auto` tries

Length = int | Sequence[int] | Literal["auto"]
Template = Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Generated:
    """tokens_ML: captions padded at the end, on the host. trace: the states on the way, the first one included."""

    tokens_ML: Tensor
    trace: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """temperature: 0 takes the likeliest token. top_p: sample from the fewest tokens that hold this probability.
    guidance: 1 is the model's own distribution, above 1 moves away from what it says without an image."""

    steps: int | None
    temperature: float
    top_p: float
    guidance: float
    beams: int


@dataclass(frozen=True)
class Sight:
    """What the decoder sees of M images: their keys, and those of "no image" for guidance."""

    keys: list[KeyValue]
    null_keys: list[KeyValue] | None

    def rows(self, chosen_M: Tensor) -> "Sight":
        if bool(chosen_M.all()):
            return self
        device = self.keys[0][0].device
        picked = chosen_M.to(device)
        return Sight([(k[picked], v[picked]) for k, v in self.keys], self.null_keys)


def pick(log_NV: Tensor, u_N: Tensor, temperature: float, top_p: float) -> Tensor:
    """Draw a token per row by inverting the distribution function at `u_N` in [0, 1)."""
    if temperature == 0:
        return log_NV.argmax(1)
    p_NV, order_NV = (log_NV.double() / temperature).softmax(1).sort(dim=1, descending=True, stable=True)
    cumulative_NV = p_NV.cumsum(1)
    p_NV = p_NV.masked_fill(cumulative_NV - p_NV >= top_p, 0.0)  # the likeliest token always stays
    cumulative_NV = p_NV.cumsum(1)
    target_N1 = u_N.to(p_NV)[:, None] * cumulative_NV[:, -1:]
    place_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True)
    return order_NV.gather(1, place_N1.clamp(max=log_NV.shape[1] - 1)).squeeze(1)


def _guided(log_NV: Tensor, null_log_NV: Tensor | None, guidance: float) -> Tensor:
    """Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598), normalised."""
    if null_log_NV is None:
        return log_NV
    impossible_NV = log_NV.isneginf()
    mixed_NV = torch.lerp(null_log_NV.masked_fill(impossible_NV, 0), log_NV.masked_fill(impossible_NV, 0), guidance)
    return mixed_NV.masked_fill(impossible_NV, -torch.inf).log_softmax(1)


def _propose(
    model: Captioner, sight: Sight, state_BL: Tensor, chosen_BL: Tensor, u_BL: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """A token for each chosen position and its log-probability, both `[N]` on the host."""
    causal_B = torch.zeros(len(state_BL), dtype=torch.bool)
    size = model.config.vocabulary.size
    hidden_ND = hidden_states(model, sight.keys, state_BL, chosen_BL, causal_B)
    null_ND = None if sight.null_keys is None else hidden_states(model, sight.null_keys, state_BL, chosen_BL, causal_B)
    nulls = [None] * len(blocks(hidden_ND, size)) if null_ND is None else blocks(null_ND, size)
    u_N = u_BL[chosen_BL].to(hidden_ND.device)
    tokens, sure = [], []
    for hidden_nD, null_nD, u_n in zip(blocks(hidden_ND, size), nulls, blocks(u_N, size), strict=True):
        null_log_nV = None if null_nD is None else inner_log_probabilities(model, null_nD)
        log_nV = _guided(inner_log_probabilities(model, hidden_nD), null_log_nV, options.guidance)
        token_n = pick(log_nV, u_n, options.temperature, options.top_p)
        tokens.append(token_n)
        sure.append(log_nV.gather(1, token_n[:, None]).squeeze(1))
    return torch.cat(tokens).cpu(), torch.cat(sure).cpu()


def ancestral(model: Captioner, sight: Sight, start_ML: Tensor, draws: PairedDraws, options: Options) -> list[Tensor]:
    """The reverse process of masked diffusion over T steps of equal size in t, from 1 to 0.

    From t to s a masked token is revealed with probability (t - s) / t, and a revealed one is carried over. What is
    revealed when does not depend on the tokens, so only captions that change in a step are decoded in it. T: as many
    steps as there are gaps, unless given.
    """
    state_ML, states = start_ML.clone(), [start_ML]
    masked_ML = state_ML == model.config.vocabulary.mask_id
    steps_M = masked_ML.sum(1) if options.steps is None else torch.full((len(start_ML),), options.steps)
    for i in range(int(steps_M.max())):
        reveal_ML, u_ML = draws.uniform(*state_ML.shape), draws.uniform(*state_ML.shape)
        now_ML = masked_ML & (reveal_ML < 1 / (steps_M - i).clamp(min=1)[:, None])
        rows_M = now_ML.any(1)
        if bool(rows_M.any()):
            tokens_N, _ = _propose(model, sight.rows(rows_M), state_ML[rows_M], now_ML[rows_M], u_ML[rows_M], options)
            state_ML = state_ML.masked_scatter(now_ML, tokens_N)
            masked_ML = masked_ML & ~now_ML
        states.append(state_ML)
    return states


def confidence(model: Captioner, sight: Sight, start_ML: Tensor, draws: PairedDraws, options: Options) -> list[Tensor]:
    """Fill the k gaps whose proposed tokens are likeliest, again and again (DDCap's best-first order).

    k: 1, or as many as it takes to be done in the given number of steps.
    """
    mask_id = model.config.vocabulary.mask_id
    state_ML, states = start_ML.clone(), [start_ML]
    gaps_M = (start_ML == mask_id).sum(1)
    k_M = torch.ones_like(gaps_M) if options.steps is None else (gaps_M / options.steps).ceil().long()
    while bool((masked_ML := state_ML == mask_id).any()):
        rows_M = masked_ML.any(1)
        u_ML = draws.uniform(*state_ML.shape)
        tokens_N, sure_N = _propose(
            model, sight.rows(rows_M), state_ML[rows_M], masked_ML[rows_M], u_ML[rows_M], options
        )
        proposed_ML = state_ML.masked_scatter(masked_ML, tokens_N)
        sure_ML = torch.full(state_ML.shape, -torch.inf).masked_scatter(masked_ML, sure_N)
        rank_ML = sure_ML.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        state_ML = torch.where(masked_ML & (rank_ML < k_M[:, None]), proposed_ML, state_ML)
        states.append(state_ML)
    return states


def autoregressive(
    model: Captioner, sight: Sight, start_ML: Tensor, draws: PairedDraws, options: Options
) -> list[Tensor]:
    """Left to right with a cache of keys and values: the likeliest token, a sample, or a beam.

    start_ML gives the largest lengths. A beam keeps the b likeliest beginnings and ends with the caption of the best
    mean log-probability per token.
    """
    search = _beam if options.beams > 1 else _one_by_one
    return search(model, sight, start_ML, draws, options)


class _Stepper:
    """The decoder's next-token log-probabilities, with its caches."""

    def __init__(self, model: Captioner, sight: Sight, guidance: float) -> None:
        self.model, self.sight, self.guidance = model, sight, guidance
        self.cache, self.null_cache = Cache(), Cache()

    def __call__(self, tokens_B: Tensor) -> Tensor:
        """`[B, V]` after `tokens_B`, which follow all earlier ones."""
        tokens_B1 = tokens_B[:, None].to(self.sight.keys[0][0].device)
        log_BV = self._next(tokens_B1, self.sight.keys, self.cache)
        null_keys = self.sight.null_keys
        null_log_BV = None if null_keys is None else self._next(tokens_B1, null_keys, self.null_cache)
        return _guided(log_BV, null_log_BV, self.guidance)

    def _next(self, tokens_B1: Tensor, keys: list[KeyValue], cache: Cache) -> Tensor:
        hidden_BD = self.model.decoder(tokens_B1, keys, cache=cache)[:, 0]
        return self.model.decoder.logits(hidden_BD).float().log_softmax(1)

    def reorder(self, rows_B: Tensor) -> None:
        for cache in (self.cache, self.null_cache):
            cache.reorder(rows_B.to(self.sight.keys[0][0].device))


def _one_by_one(model: Captioner, sight: Sight, start_ML: Tensor, draws: PairedDraws, options: Options) -> list[Tensor]:
    vocabulary = model.config.vocabulary
    last_M = (start_ML != vocabulary.pad_id).sum(1) - 1
    state_ML, states = start_ML.clone(), [start_ML]
    token_M = torch.full((len(start_ML),), vocabulary.bos_id)
    step, ended_M = _Stepper(model, sight, options.guidance), torch.zeros(len(start_ML), dtype=torch.bool)
    for place in range(start_ML.shape[1]):
        u_M = draws.uniform(len(start_ML), 1)[:, 0]
        log_MV = step(token_M)
        token_M = pick(log_MV, u_M.to(log_MV.device), options.temperature, options.top_p).cpu()
        token_M = token_M.masked_fill(last_M == place, vocabulary.eos_id).masked_fill(ended_M, vocabulary.pad_id)
        ended_M = ended_M | (token_M == vocabulary.eos_id)
        state_ML = state_ML.clone()
        state_ML[:, place] = token_M
        state_ML[ended_M, place + 1 :] = vocabulary.pad_id
        states.append(state_ML)
        if bool(ended_M.all()):
            break
    return states


def _beam(model: Captioner, sight: Sight, start_ML: Tensor, draws: PairedDraws, options: Options) -> list[Tensor]:
    vocabulary, b, device = model.config.vocabulary, options.beams, sight.keys[0][0].device
    (M, L), V, eos = start_ML.shape, vocabulary.size, vocabulary.eos_id
    last_B = ((start_ML != vocabulary.pad_id).sum(1) - 1).repeat_interleave(b).to(device)
    state_BL = torch.full((M * b, L), vocabulary.pad_id, device=device)
    total_Mb = torch.full((M, b), -torch.inf, device=device)
    total_Mb[:, 0] = 0.0  # one beginning, until it branches
    token_B = torch.full((M * b,), vocabulary.bos_id, device=device)
    ended_B = torch.zeros(M * b, dtype=torch.bool, device=device)
    first_B = torch.arange(M, device=device).repeat_interleave(b) * b
    only_pad_V = torch.full((V,), -torch.inf, device=device)
    only_pad_V[vocabulary.pad_id] = 0.0
    not_eos_V = torch.arange(V, device=device) != eos
    step, states = _Stepper(model, sight, options.guidance), [start_ML]
    for place in range(L):
        log_BV = step(token_B)
        log_BV = log_BV.masked_fill((last_B == place)[:, None] & not_eos_V, -torch.inf)
        log_BV = torch.where(ended_B[:, None], only_pad_V, log_BV)
        total_Mb, best_Mb = (total_Mb[:, :, None] + log_BV.view(M, b, V)).flatten(1).topk(b, dim=1)
        rows_B, token_B = first_B + (best_Mb // V).flatten(), (best_Mb % V).flatten()
        step.reorder(rows_B)
        state_BL, ended_B = state_BL[rows_B], ended_B[rows_B]
        state_BL[:, place] = token_B
        ended_B = ended_B | (token_B == eos) | (token_B == vocabulary.pad_id)
        states.append(_best_beam(state_BL, total_Mb, vocabulary.pad_id))
        if bool(ended_B.all()):
            break
    return states


def _best_beam(state_BL: Tensor, total_Mb: Tensor, pad_id: int) -> Tensor:
    M, b = total_Mb.shape
    lengths_Mb = (state_BL != pad_id).sum(1).clamp(min=1).view(M, b)
    best_M = (total_Mb / lengths_Mb).argmax(1)
    return state_BL.view(M, b, -1)[torch.arange(M, device=state_BL.device), best_M].cpu()


@dataclass(frozen=True)
class Sampler:
    """function: from a start with gaps to the states on the way. objectives: whose models it fits. temperature: its
    own, where none is given."""

    function: Callable[[Captioner, Sight, Tensor, PairedDraws, Options], list[Tensor]]
    objectives: Sequence[str]
    temperature: float


SAMPLERS: dict[str, Sampler] = {
    "confidence": Sampler(confidence, MASKED, 0.0),
    "ancestral": Sampler(ancestral, MASKED, 1.0),
    "autoregressive": Sampler(autoregressive, CAUSAL, 0.0),
}


def default_sampler(objective: str) -> str:
    """The sampler that fits an objective; raises UserError for those that write no captions."""
    for name, sampler in SAMPLERS.items():
        if objective in sampler.objectives:
            return name
    raise UserError(f"a model of objective {objective!r} compares captions but writes none")


def _chosen(sampler: str | None, config: ModelConfig) -> Sampler:
    objective = config.pretrain.objective
    fitting = default_sampler(objective)
    name = sampler or fitting
    chosen = choose("sampler", name, SAMPLERS)
    if objective not in chosen.objectives:
        raise UserError(f"sampler {name!r} does not fit a model of objective {objective!r}; take {fitting!r}")
    return chosen


def _start(config: ModelConfig, images: int, lengths: Sequence[int], templates: Sequence[Sequence[int]]) -> Tensor:
    """Captions with gaps `[M, L]`: of the lengths given, or the templates."""
    vocabulary, longest = config.vocabulary, config.max_tokens
    rows = [list(row) for row in templates] or [[vocabulary.mask_id] * (n - 1) + [vocabulary.eos_id] for n in lengths]
    if len(rows) != images:
        raise UserError(f"{len(rows)} lengths or templates for {images} images; give one, or one per image")
    for row in rows:
        if not row or row[-1] != vocabulary.eos_id:
            raise UserError("a template must end with the end token; make it by the tokenizer's encode_template")
        if not 2 <= len(row) <= longest:
            raise UserError(f"length {len(row)} is outside 2..{longest}, the model's positions (end token included)")
    width = max(map(len, rows), default=0)
    return torch.tensor([row + [vocabulary.pad_id] * (width - len(row)) for row in rows]).view(images, width)


def _per_image(value: int | Sequence[int], images: int) -> list[int]:
    return [value] * images if isinstance(value, int) else list(value)


def _checked(options: Options, sampler: Sampler, model: Captioner, template: object) -> None:
    if options.temperature < 0 or not 0 < options.top_p <= 1:
        raise UserError(f"temperature {options.temperature} must be at least 0 and top_p {options.top_p} in (0, 1]")
    if options.steps is not None and (options.steps < 1 or sampler.function is autoregressive):
        raise UserError(f"steps {options.steps}: at least 1, and only for samplers that unmask")
    if options.guidance != 1 and model.null_D is None:
        raise UserError(
            f"guidance {options.guidance} needs a model that was trained with images dropped; "
            "set pretrain.image_drop above 0 and train again, or leave guidance at 1"
        )
    if template is not None and sampler.function is autoregressive:
        raise UserError("only models that read masked captions fill templates; take one of objective mdc")
    if options.beams < 1 or (options.beams > 1 and (sampler.function is not autoregressive or options.temperature)):
        raise UserError(f"beams {options.beams}: beam search is for the autoregressive sampler at temperature 0")


@torch.no_grad()
def generate(
    model: nn.Module,
    config: ModelConfig,
    patches_MPD: Tensor,
    length: Length = 10,
    sampler: str | None = None,
    *,
    steps: int | None = None,
    seed: Seeds = 0,
    temperature: float | None = None,
    top_p: float = 1.0,
    guidance: float = 1.0,
    beams: int = 1,
    template: Template | None = None,
    lengths: Sequence[int] | None = None,
    trace: bool = False,
) -> Generated:
    """Write a caption for each of M images.

    patches_MPD: from `model.encode`. length: in tokens, [EOS] included; one number, one per image, or `auto`: write
    captions of several `lengths` and keep the one with the best `unmask` score per token. steps: of `ancestral` and
    `confidence`. seed: one number gives every image the same random numbers, a sequence gives each its own.
    temperature: None is the sampler's own: 1 for `ancestral`, 0 for the others. template: token ids with [MASK] for
    each gap, one for all images or one per image; takes the place of length. trace: also return the states on the
    way. Raises UserError for options that do not fit the model or each other.
    """
    inner, images = unwrapped(model), len(patches_MPD)
    chosen = _chosen(sampler, config)
    assert isinstance(inner, Captioner)
    options = Options(steps, chosen.temperature if temperature is None else temperature, top_p, guidance, beams)
    _checked(options, chosen, inner, template)
    if length == "auto" and template is None:
        if chosen.function is autoregressive:
            length = config.max_tokens
        else:
            length = _auto_lengths(inner, config, patches_MPD, chosen, options, seed, lengths)
    templates = _templates(template, images)
    spans = [] if templates else _per_image(length, images)  # type: ignore[arg-type]
    start_ML = _start(config, images, spans, templates)
    return _run(inner, config, patches_MPD, start_ML, chosen, options, seed, trace)


def fill(
    model: nn.Module, config: ModelConfig, patches_MPD: Tensor, template: Template, seed: Seeds = 0, **options: Any
) -> Tensor:
    """Fill the gaps of a template for each image, `[M, L]`; the given words stay. options: those of `generate`."""
    return generate(model, config, patches_MPD, template=template, seed=seed, **options).tokens_ML


def _templates(template: Template | None, images: int) -> list[list[int]]:
    if template is None:
        return []
    if template and isinstance(template[0], int):
        return [list(template)] * images  # type: ignore[arg-type]
    return [list(row) for row in template]  # type: ignore[arg-type]


def _run(
    model: Captioner,
    config: ModelConfig,
    patches_MPD: Tensor,
    start_ML: Tensor,
    sampler: Sampler,
    options: Options,
    seed: Seeds,
    trace: bool,
) -> Generated:
    """Sample chunk by chunk; captions do not depend on how images are divided."""
    count = max(1, TOKENS_AT_ONCE // max(1, start_ML.shape[1] * options.beams))
    null_keys = model.null_keys() if options.guidance != 1 else None
    parts = []
    for m in range(0, len(start_ML), count):
        seeds = seed if isinstance(seed, int) else seed[m : m + count]
        draws = PairedDraws.of(seeds, "generate", 1, 1, config.max_tokens)
        sight = Sight(model.decoder.keys(patches_MPD[m : m + count]), null_keys)
        parts.append(sampler.function(model, sight, start_ML[m : m + count], draws, options))
    steps = max(map(len, parts), default=0)
    states = [torch.cat([part[min(i, len(part) - 1)] for part in parts]) for i in range(steps)]
    return Generated(states[-1] if states else start_ML, states if trace else [])


def _auto_lengths(
    model: Captioner,
    config: ModelConfig,
    patches_MPD: Tensor,
    sampler: Sampler,
    options: Options,
    seed: Seeds,
    lengths: Sequence[int] | None,
) -> list[int]:
    """For each image the length whose caption has the best `unmask` log-likelihood per word token."""
    tried = sorted(set(lengths or torch.linspace(3, config.max_tokens, AUTO_LENGTHS).round().long().tolist()))
    values = []
    for length in tried:
        start_ML = _start(config, len(patches_MPD), [length] * len(patches_MPD), [])
        tokens_ML = _run(model, config, patches_MPD, start_ML, sampler, options, seed, trace=False).tokens_ML
        values.append(score(model, config, patches_MPD, tokens_ML[:, None], "unmask").value_MK[:, 0] / (length - 1))
    return [tried[i] for i in torch.stack(values).argmax(0).tolist()]
