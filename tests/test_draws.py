"""Draws depend on seed, step, stream and row of the global batch, and on nothing else."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mdc.draws import Draws, as_draws, derive_seed


def parts(total: int, cuts: list[int], width: int = 0) -> list[Draws]:
    starts = [0, *cuts]
    return [Draws.at(7, 3, "masks", first=first, total=total, width=width) for first in starts]


def sizes(total: int, cuts: list[int]) -> list[int]:
    edges = [0, *cuts, total]
    return [end - start for start, end in pairwise(edges)]


@pytest.mark.parametrize("cuts", [[4], [2, 4, 6], [1, 7]])
def test_parts_of_a_batch_see_the_rows_of_the_whole(cuts: list[int]) -> None:
    def draw(draws: Draws, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return draws.stratified(rows), draws.uniform(rows, 5), draws.uniform(rows)

    whole = draw(Draws.at(7, 3, "masks"), 8)
    pieces = [draw(draws, rows) for draws, rows in zip(parts(8, cuts), sizes(8, cuts), strict=True)]
    for expected, got in zip(whole, zip(*pieces, strict=True), strict=True):
        assert torch.equal(torch.cat(got), expected)


def test_padding_of_a_part_shifts_nothing() -> None:
    """Two ranks pad to 3 and 6 tokens; with a fixed width both see the columns of the whole, and later draws too."""
    whole = Draws.at(7, 3, "masks", width=9)
    expected, later = whole.uniform(8, 6), whole.uniform(8)
    for draws, first, columns in zip(parts(8, [4], width=9), (0, 4), (3, 6), strict=True):
        assert torch.equal(draws.uniform(4, columns), expected[first : first + 4, :columns])
        assert torch.equal(draws.uniform(4), later[first : first + 4])


def test_other_seeds_steps_and_streams_give_other_numbers() -> None:
    keys: list[tuple[int | str, ...]] = [(0, 1, "t"), (1, 0, "t"), (0, 1, "mask"), (0, 11, "t"), (0, 1, 1)]
    draws = [Draws.at(*key).uniform(4) for key in keys]
    for i, one in enumerate(draws):
        assert torch.equal(one, Draws.at(*keys[i]).uniform(4))
        assert not any(torch.equal(one, other) for other in draws[i + 1 :])


def test_stratified_draws_are_evenly_spread() -> None:
    values = Draws.at(0, "t").stratified(64).sort().values
    assert values.min() >= 0
    assert values.max() < 1
    assert torch.allclose(values.diff(), torch.full((63,), 1 / 64), atol=1e-6)
    offsets = torch.stack([Draws.at(seed, "t").stratified(4).min() for seed in range(2000)])
    assert abs(offsets.mean() - 1 / 8) < 0.005  # the smallest of four strata is uniform over [0, 1/4)


def test_uniform_draws_are_uniform() -> None:
    values = Draws.at(0, "u").uniform(100, 200)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005


def test_rows_outside_the_batch_are_a_bug() -> None:
    with pytest.raises(AssertionError, match=r"rows 6\.\.10 outside a batch of 8"):
        Draws.at(0, first=6, total=8).uniform(4)


def test_a_plain_generator_stands_for_a_whole_batch() -> None:
    draws = as_draws(torch.Generator().manual_seed(5))
    assert torch.equal(draws.uniform(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert as_draws(draws) is draws


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = Draws.at(0, 1).uniform(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(Draws.at(0, 1).uniform(4), first)


def test_seeds_do_not_collide_where_sums_would() -> None:
    seeds = {derive_seed(a, b, c) for a in range(12) for b in range(12) for c in ("x", "y")}
    assert len(seeds) == 12 * 12 * 2
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
