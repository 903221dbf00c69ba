"""Random numbers as a function of (seed, step, stream) and the row of the global batch: never of the rank.

A rank holds rows `first .. first + B` of a global batch of `total` rows. Each draw is made for all rows and cut to the
rank's own, so one rank of 128 rows, two of 64, and two micro-batches of 64 see the same numbers. Captions are padded
to different lengths on different ranks, so draws per token are made at a fixed width and cut as well.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any mixture of numbers and names; unlike a sum, no two mixtures collide in practice."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass
class Draws:
    """The generator of one global batch, seen from the rows `first .. first + B` of its `total`.

    width: columns drawn per row where fewer are asked for, so that padding does not shift later draws.
    """

    generator: torch.Generator
    first: int = 0
    total: int | None = None
    width: int = 0

    @classmethod
    def at(cls, *parts: int | str, first: int = 0, total: int | None = None, width: int = 0) -> "Draws":
        """Seeded by `parts`, such as (seed, step, stream)."""
        return cls(torch.Generator().manual_seed(derive_seed(*parts)), first, total, width)

    def rows(self, count: int) -> slice:
        return slice(self.first, self.first + count)

    def total_rows(self, count: int) -> int:
        total = count if self.total is None else self.total
        assert self.first + count <= total, f"rows {self.first}..{self.first + count} outside a batch of {total}"
        return total

    def uniform(self, rows: int, columns: int | None = None) -> Tensor:
        """U[0, 1) of shape `[rows]`, or `[rows, columns]`, on the CPU."""
        total = self.total_rows(rows)
        if columns is None:
            return torch.rand(total, generator=self.generator)[self.rows(rows)]
        drawn = torch.rand(total, max(columns, self.width), generator=self.generator)
        return drawn[self.rows(rows), :columns]

    def stratified(self, rows: int) -> Tensor:
        """U[0, 1) of shape `[rows]`, spread evenly over the global batch: one offset plus i / total, modulo 1."""
        total = self.total_rows(rows)
        offset = torch.rand((), generator=self.generator)
        return ((offset + torch.arange(total) / total) % 1.0)[self.rows(rows)]


def as_draws(generator: "torch.Generator | Draws") -> Draws:
    """A plain generator stands for a batch that is whole."""
    return generator if isinstance(generator, Draws) else Draws(generator)
