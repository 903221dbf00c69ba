from functools import partial

import pytest
import torch
from torch import Tensor

from mdc.draws import Draws
from mdc.objectives import corrupt

PAD, BOS, EOS, MASK = 0, 2, 3, 4


def captions(*lengths: int, width: int | None = None) -> Tensor:
    """Rows of ordinary tokens 5, 6, ... that end with EOS, padded."""
    tokens_BL = torch.full((len(lengths), width or max(lengths)), PAD)
    for row, n in zip(tokens_BL, lengths, strict=True):
        row[:n] = torch.arange(5, 5 + n)
        row[n - 1] = EOS
    return tokens_BL


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


ALL = {
    "diffusion": partial(corrupt.diffusion, t_min=0.0, t_max=1.0),
    "without t": partial(corrupt.diffusion, reweight=False),
    "independent t": partial(corrupt.diffusion, stratified=False),
    "exact count": corrupt.exact_count,
    "bert": partial(corrupt.fixed_ratio, ratio=0.5),
    "bert 80/10/10": partial(corrupt.fixed_ratio, ratio=0.5, replacements_R=torch.arange(5, 30)),
    "autoregressive": partial(corrupt.shifted, bos_id=BOS),
    "cappa": partial(corrupt.parallel_or_shifted, bos_id=BOS),
}


@pytest.mark.parametrize("name", ALL)
def test_padding_is_never_masked_nor_predicted(name: str) -> None:
    tokens_BL = captions(*[1, 2, 3, 9] * 50)
    inputs_BL, weights_BL, causal_B = ALL[name](tokens_BL, PAD, MASK, generator())
    pad_BL = tokens_BL == PAD
    assert torch.equal(inputs_BL == PAD, pad_BL)
    assert (weights_BL[pad_BL] == 0).all()
    assert weights_BL.isfinite().all()
    assert (weights_BL[~pad_BL] > 0).any()
    assert inputs_BL.dtype == torch.int64
    assert causal_B.shape == (200,)


@pytest.mark.parametrize("name", ALL)
def test_a_rank_sees_its_rows_of_the_global_batch_whatever_its_own_padding(name: str) -> None:
    tokens_BL = captions(9, 9, 9, 2, 3, 3, 5, 4)
    whole = ALL[name](tokens_BL, PAD, MASK, Draws.at(1, total=8, width=12))
    parts = [
        ALL[name](
            tokens_BL[first : first + 4, : 9 if first == 0 else 5],
            PAD,
            MASK,
            Draws.at(1, first=first, total=8, width=12),
        )
        for first in (0, 4)
    ]
    for all_rows, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(all_rows[:4], first)
        assert torch.equal(all_rows[4:, :5] if all_rows.ndim == 2 else all_rows[4:], second)


def test_diffusion_masks_a_share_t_and_weighs_by_its_inverse() -> None:
    tokens_BL = captions(*[20] * 2000)
    inputs_BL, weights_BL, causal_B = corrupt.diffusion(tokens_BL, PAD, MASK, generator(), t_min=0.3, t_max=0.9)
    masked_BL = weights_BL > 0
    assert torch.equal(inputs_BL == MASK, masked_BL)
    assert torch.equal(inputs_BL[~masked_BL], tokens_BL[~masked_BL])
    assert not causal_B.any()
    t_B = 1 / weights_BL.amax(1)
    assert 0.3 <= t_B.min() < 0.31
    assert 0.89 < t_B.max() <= 0.9
    low_B = t_B < 0.6
    for rows_B, expected in ((low_B, 0.45), (~low_B, 0.75)):
        assert abs(masked_BL[rows_B].float().mean() - expected) < 0.01


def test_t_is_spread_evenly_over_the_batch() -> None:
    tokens_BL = captions(*[30] * 64)
    _, weights_BL, _ = corrupt.diffusion(tokens_BL, PAD, MASK, generator(), t_min=0.5, t_max=1.0)
    gaps = (1 / weights_BL.amax(1)).sort().values.diff()
    torch.testing.assert_close(gaps, torch.full((63,), 0.5 / 64), atol=1e-5, rtol=0)


def test_one_token_captions_keep_finite_weights_down_to_the_smallest_t() -> None:
    tokens_BL = captions(*[1] * 100_000)
    _, weights_BL, _ = corrupt.diffusion(tokens_BL, PAD, MASK, generator(), t_min=0.0, t_max=1.0, t_floor=0.001)
    assert weights_BL.isfinite().all()
    assert weights_BL.max() <= 1000
    assert abs(weights_BL.mean() - 1) < 0.03  # masked with probability t, weighed by 1/t


def test_exact_count_masks_each_number_of_tokens_equally_often() -> None:
    tokens_BL = captions(*[1, 4] * 4000)
    inputs_BL, weights_BL, _ = corrupt.exact_count(tokens_BL, PAD, MASK, generator())
    counts_B = (inputs_BL == MASK).sum(1)
    assert (counts_B[0::2] == 1).all()
    shares = torch.bincount(counts_B[1::2], minlength=5) / 4000
    torch.testing.assert_close(shares, torch.tensor([0, 0.25, 0.25, 0.25, 0.25]), atol=0.01, rtol=0)
    per_place = (inputs_BL[1::2] == MASK).float().mean(0)
    torch.testing.assert_close(per_place, torch.full((4,), 0.625), atol=0.03, rtol=0)
    assert torch.equal(weights_BL > 0, inputs_BL == MASK)


def test_bert_chooses_its_ratio_and_replaces_by_its_rule() -> None:
    tokens_BL = captions(*[20] * 3000)
    inputs_BL, weights_BL, _ = corrupt.fixed_ratio(
        tokens_BL, PAD, MASK, generator(), ratio=0.15, replacements_R=torch.tensor([90, 91])
    )
    chosen_BL = weights_BL > 0
    assert abs(chosen_BL.float().mean() - 0.15) < 0.01
    assert torch.equal(inputs_BL[~chosen_BL], tokens_BL[~chosen_BL])
    read_N, true_N = inputs_BL[chosen_BL], tokens_BL[chosen_BL]
    assert abs((read_N == MASK).float().mean() - 0.8) < 0.02
    assert abs(((read_N == 90) | (read_N == 91)).float().mean() - 0.1) < 0.02
    assert abs((read_N == true_N).float().mean() - 0.1) < 0.02
    only_masks_BL, weights_BL, _ = corrupt.fixed_ratio(tokens_BL, PAD, MASK, generator(), ratio=0.15)
    assert torch.equal(only_masks_BL == MASK, weights_BL > 0)


def test_autoregressive_shifts_behind_the_begin_token() -> None:
    inputs_BL, weights_BL, causal_B = corrupt.shifted(captions(3, 5), PAD, MASK, bos_id=BOS)
    assert inputs_BL.tolist() == [[BOS, 5, 6, PAD, PAD], [BOS, 5, 6, 7, 8]]
    assert weights_BL.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert causal_B.all()


def test_cappa_mixes_both_ways_of_reading_per_caption() -> None:
    tokens_BL = captions(*[4] * 4000)
    inputs_BL, weights_BL, causal_B = corrupt.parallel_or_shifted(
        tokens_BL, PAD, MASK, generator(), bos_id=BOS, parallel=0.75
    )
    assert abs(causal_B.float().mean() - 0.25) < 0.03
    assert (inputs_BL[~causal_B] == MASK).all()
    assert (inputs_BL[causal_B] == torch.tensor([BOS, 5, 6, 7])).all()
    assert (weights_BL == 1).all()


def test_a_begin_or_pad_id_of_zero_is_an_id_like_any_other() -> None:
    tokens_BL = torch.tensor([[5, 0, 3, 9], [5, 3, 9, 9]])  # 0 is an ordinary word, 9 is padding
    inputs_BL, weights_BL, _ = corrupt.diffusion(tokens_BL, 9, MASK, generator(), t_min=0.99, t_max=1.0)
    assert (inputs_BL == MASK).sum() == 5
    assert ((weights_BL > 0) == (tokens_BL != 9)).all()
