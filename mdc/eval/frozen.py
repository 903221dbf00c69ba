"""Frozen features of labelled pictures, made once for each encoder and each set of pictures, and kept on disk.

Letters: N pictures, D width.
"""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from mdc import dist
from mdc.eval.kept import ROWS, Block, RowSet, absent, keep, places, reserved
from mdc.eval.labelled import Split

AT_ONCE = 256  # pictures

Encode = Callable[[Sequence[Image.Image]], Tensor]  # N pictures -> [N, D] or [N, P, D] float32 on the CPU


class _Pictures:
    """Those of a split, as `mdc.eval.kept.Pictures`."""

    def __init__(self, split: Split) -> None:
        self._split, self.mark = split, split.mark
        self.blocks = -(-len(split) // AT_ONCE)

    def __len__(self) -> int:
        return len(self._split)

    def read(self, numbers: range) -> Generator[Block[Sequence[Image.Image]], None, None]:
        for number in numbers:
            rows = range(number * AT_ONCE, min((number + 1) * AT_ONCE, len(self)))
            yield Block(rows, [self._split.keys[row] for row in rows], [self._split.open(row) for row in rows])


def frozen_features(encode: Encode, mark: str, split: Split, cache: Path, title: str = "features") -> np.ndarray:
    """`[N, D]`, or `[N, P, D]` of patches, as float16, mapped: row i belongs to picture i.

    mark: a hash of weights and transform; together with the split's it names the folder under `cache` where the
    features are kept. With several ranks each encodes its share and all see the whole. Raises UserError that names
    pictures whose features are not finite or too large for float16.
    """
    sets, pictures = [RowSet("features", mark, encode)], _Pictures(split)
    with reserved(absent(places(sets, pictures, cache)) if dist.is_main() else []):
        (folder,) = keep(sets, pictures, cache, title)
    return np.load(folder / ROWS, mmap_mode="r")


def pixels(size: int) -> Encode:
    """Raw pixels of the centre square at `size` as features: the floor of every table."""

    def encode(pictures: Sequence[Image.Image]) -> Tensor:
        rows = []
        for picture in pictures:
            rgb = torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).permute(2, 0, 1).float() / 127.5 - 1
            side = min(rgb.shape[1:])
            top, left = (rgb.shape[1] - side) // 2, (rgb.shape[2] - side) // 2
            square = rgb[None, :, top : top + side, left : left + side]
            rows.append(F.interpolate(square, (size, size), mode="bilinear", antialias=True).flatten())
        return torch.stack(rows)

    return encode
