"""Frozen features of labelled pictures, made once for each encoder and each set of pictures, and kept on disk.

Letters: N pictures, D width.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mdc import dist
from mdc.errors import UserError
from mdc.eval.labelled import Split
from mdc.files import MANIFEST, damage, fingerprint, whole_folder, write_manifest

FEATURES = "features.npy"
AT_ONCE = 256  # pictures

Encode = Callable[[Sequence[Image.Image]], Tensor]  # N pictures -> [N, D] or [N, P, D] float32 on the CPU


def frozen_features(encode: Encode, mark: str, split: Split, cache: Path, name: str = "features") -> np.ndarray:
    """`[N, D]`, or `[N, P, D]` of patches, as float16, mapped: row i belongs to picture i.

    mark: a hash of weights and transform; together with the split's it names the folder under `cache` where the
    features are kept. With several ranks each encodes its share and all see the whole. Raises UserError that names the
    pictures whose features are not finite or too large for float16.
    """
    folder = cache / fingerprint([mark, split.mark])
    known = dist.is_main() and (folder / MANIFEST).is_file() and not damage(folder)
    if any(dist.gather_objects(known)):
        return np.load(folder / FEATURES, mmap_mode="r")
    rows = range(len(split) * dist.rank() // dist.world_size(), len(split) * (dist.rank() + 1) // dist.world_size())
    parts: list[np.ndarray] = []
    with tqdm(total=len(rows), desc=name, unit="image", disable=not dist.is_main()) as progress:
        for start in range(rows.start, rows.stop, AT_ONCE):
            some = range(start, min(start + AT_ONCE, rows.stop))
            parts.append(encode([split.open(i) for i in some]).to(torch.float16).numpy())
            progress.update(len(some))
    own = np.concatenate(parts) if parts else None
    broken = (
        []
        if own is None
        else [split.keys[rows[i]] for i in np.flatnonzero(~np.isfinite(own.reshape(len(own), -1)).all(axis=1))]
    )
    if all_broken := [key for each in dist.gather_objects(broken) for key in each]:
        raise UserError(
            f"features of {len(all_broken)} pictures are not finite or too large for float16: "
            f"{', '.join(all_broken[:10])}; look at these pictures, or at the model if it diverged"
        )
    gathered = [part for part in dist.gather_objects(own) if part is not None]
    if dist.is_main():
        whole = np.concatenate(gathered)
        assert len(whole) == len(split), f"{len(whole)} rows for {len(split)} pictures"
        with whole_folder(folder) as temporary:
            np.save(temporary / FEATURES, whole)
            write_manifest(temporary, {"encoder": mark, "pictures": split.mark}, {"rows": len(whole)})
    dist.barrier()
    return np.load(folder / FEATURES, mmap_mode="r")


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
