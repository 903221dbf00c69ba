"""What the decoder reads and what it must predict: one function per captioning objective (METHOD section 3).

Each takes `(tokens_BL, pad_id, mask_id, generator)`, its options bound beforehand, and returns

    inputs_BL    what the decoder reads
    weights_BL   the weight of predicting `tokens_BL` at each position, 0 where nothing is predicted
    causal_B     whether the row's tokens see only what comes before them

Captions end in padding. Padding is never masked and never predicted. A caption in which nothing happens to be masked
has weights of 0 and so contributes exactly 0. `generator` is a torch.Generator for a whole batch, or `Draws` for the
rows of a rank. Training, validation and scoring call these same functions.

Letters: B captions, L tokens, N real tokens of a caption.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mdc.draws import Draws, as_draws

Corrupted = tuple[Tensor, Tensor, Tensor]
Corruption = Callable[[Tensor, int, int, "torch.Generator | Draws"], Corrupted]


def _full(tokens_BL: Tensor) -> Tensor:
    return torch.zeros(len(tokens_BL), dtype=torch.bool, device=tokens_BL.device)


def diffusion(
    tokens_BL: Tensor,
    pad_id: int,
    mask_id: int,
    generator: torch.Generator | Draws,
    *,
    t_min: float = 0.5,
    t_max: float = 1.0,
    t_floor: float = 0.001,
    stratified: bool = True,
    reweight: bool = True,
) -> Corrupted:
    """Each real token is masked with probability t ~ U[t_min, t_max], one t per caption (METHOD section 2).

    t_floor: the smallest t drawn where t_min is below it. stratified: spread t evenly over the batch.
    reweight: weight 1/t, the diffusion objective; without it weight 1 (`cmlm`, the ablation without t).
    """
    draws = as_draws(generator)
    B, L = tokens_BL.shape
    low = max(t_min, t_floor)
    t_B1 = low + (t_max - low) * (draws.stratified(B) if stratified else draws.uniform(B))[:, None]
    masked_BL = ((draws.uniform(B, L) < t_B1).to(tokens_BL.device)) & (tokens_BL != pad_id)
    weight_B1 = (1 / t_B1 if reweight else torch.ones_like(t_B1)).to(tokens_BL.device)
    return tokens_BL.masked_fill(masked_BL, mask_id), masked_BL * weight_B1, _full(tokens_BL)


def exact_count(
    tokens_BL: Tensor, pad_id: int, mask_id: int, generator: torch.Generator | Draws, *, stratified: bool = True
) -> Corrupted:
    """Exactly n of a caption's N real tokens are masked, n ~ U{1..N} (an option of `cmlm`)."""
    draws = as_draws(generator)
    B, L = tokens_BL.shape
    real_BL = tokens_BL != pad_id
    u_B = (draws.stratified(B) if stratified else draws.uniform(B)).to(tokens_BL.device)
    count_B = real_BL.sum(1)
    n_B = torch.minimum((u_B * count_B).floor() + 1, count_B)
    keys_BL = draws.uniform(B, L).to(tokens_BL.device).masked_fill(~real_BL, 2.0)  # padding comes last
    rank_BL = keys_BL.argsort(dim=1).argsort(dim=1)
    masked_BL = rank_BL < n_B[:, None]
    return tokens_BL.masked_fill(masked_BL, mask_id), masked_BL.float(), _full(tokens_BL)


def fixed_ratio(
    tokens_BL: Tensor,
    pad_id: int,
    mask_id: int,
    generator: torch.Generator | Draws,
    *,
    ratio: float = 0.15,
    replacements_R: Tensor | None = None,
) -> Corrupted:
    """Each real token is chosen with the same probability `ratio` (`bert`).

    replacements_R: None reads [MASK] at every chosen position; ids make it BERT's rule: 80 % [MASK], 10 % one of these
    ids at random, 10 % the token itself.
    """
    draws = as_draws(generator)
    B, L = tokens_BL.shape
    chosen_BL = (draws.uniform(B, L).to(tokens_BL.device) < ratio) & (tokens_BL != pad_id)
    inputs_BL = tokens_BL.masked_fill(chosen_BL, mask_id)
    if replacements_R is not None:
        kind_BL = draws.uniform(B, L).to(tokens_BL.device)
        pick_BL = (draws.uniform(B, L) * len(replacements_R)).long().clamp(max=len(replacements_R) - 1)
        random_BL = replacements_R[pick_BL].to(tokens_BL.device)
        inputs_BL = torch.where(chosen_BL & (kind_BL >= 0.8), random_BL, inputs_BL)
        inputs_BL = torch.where(chosen_BL & (kind_BL >= 0.9), tokens_BL, inputs_BL)
    return inputs_BL, chosen_BL.float(), _full(tokens_BL)


def shifted(
    tokens_BL: Tensor, pad_id: int, mask_id: int, generator: torch.Generator | Draws | None = None, *, bos_id: int
) -> Corrupted:
    """The caption moved right by one behind [BOS], read causally; each real token is predicted (`autoregressive`)."""
    real_BL = tokens_BL != pad_id
    inputs_BL = tokens_BL.roll(1, dims=1)
    inputs_BL[:, 0] = bos_id
    return inputs_BL.masked_fill(~real_BL, pad_id), real_BL.float(), ~_full(tokens_BL)


def parallel_or_shifted(
    tokens_BL: Tensor,
    pad_id: int,
    mask_id: int,
    generator: torch.Generator | Draws,
    *,
    bos_id: int,
    parallel: float = 0.75,
) -> Corrupted:
    """With probability `parallel` all [MASK] under full attention, else as `shifted`; per caption (`cappa`)."""
    inputs_BL, weights_BL, _ = shifted(tokens_BL, pad_id, mask_id, bos_id=bos_id)
    parallel_B = (as_draws(generator).uniform(len(tokens_BL)) < parallel).to(tokens_BL.device)
    masks_BL = tokens_BL.masked_fill(tokens_BL != pad_id, mask_id)
    return torch.where(parallel_B[:, None], masks_BL, inputs_BL), weights_BL, ~parallel_B
