"""Frozen features, read once by everything that follows: one row per sample, in one order, as float16 on disk.

Three sets: the mean of the trained encoder's patch features; the same of the encoder before its first update; raw
pixels. The last two are the floors that the first must beat.

Letters: B batch, C channels, H W image size, P patches, D width, N samples.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mdc import dist
from mdc.config import Params
from mdc.data.loader import ShardDataset, eval_batches
from mdc.data.shards import SAMPLES, read_index
from mdc.data.transforms import eval_images
from mdc.errors import UserError
from mdc.eval.index import CosineIndex
from mdc.files import MANIFEST, read_manifest, sha256, whole_folder, write_manifest
from mdc.train.checkpoint import LoadedModel, load_model, untrained_model

INDEX = "index"
SETS = ("model", "untrained", "pixels")
COLUMNS = ("uid", "split", "label", "caption", "group", "picture")  # picture: hash of the pixels

Encode = Callable[[Tensor], Tensor]  # images_BCHW uint8, on the device -> [B, D]


@dataclass(frozen=True)
class Features:
    """What `extract_features` wrote.

    samples: one row per sample, with `COLUMNS` as strings, "" for a missing one. arrays: `[N, D]` float16 by set.
    """

    samples: pd.DataFrame
    arrays: Mapping[str, np.ndarray]
    fingerprint: str  # of the model
    index: CosineIndex


def read_features(folder: Path) -> Features:
    """Open a folder of features; arrays are mapped, not read."""
    manifest = read_manifest(folder, made_by="extract")
    samples = pd.read_parquet(folder / SAMPLES).fillna("")
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in SETS if (folder / f"{name}.npy").exists()
    }
    for name, array in arrays.items():
        if len(array) != len(samples):
            raise UserError(f"{folder / name}.npy has {len(array)} rows for {len(samples)} samples; extract again")
    return Features(samples, arrays, manifest["fingerprint"], CosineIndex.load(folder / INDEX))


def _pooled(model: nn.Module, size: int, images_BCHW: Tensor) -> Tensor:
    return model.encode(eval_images(images_BCHW, size)).mean(1)  # type: ignore[operator]


def _pixels(size: int, images_BCHW: Tensor) -> Tensor:
    return eval_images(images_BCHW, size).flatten(1)


def _encoders(params: Params, loaded: LoadedModel, device: torch.device) -> dict[str, Encode]:
    pretrain = loaded.config.pretrain
    encoders: dict[str, Encode] = {"model": partial(_pooled, loaded.model, pretrain.image_size)}
    if params.extract.floors:
        untrained = untrained_model(loaded.config, pretrain.seed).to(device)
        encoders["untrained"] = partial(_pooled, untrained, pretrain.image_size)
        encoders["pixels"] = partial(_pixels, params.extract.pixel_size)
    return encoders


def as_float16(features_BD: Tensor, name: str, uids: Sequence[str]) -> np.ndarray:
    """Rows for the disk; raises UserError that names the samples whose features are not finite."""
    stored = features_BD.float().to(torch.float16).cpu().numpy()
    broken = ~np.isfinite(stored).all(axis=1)
    if broken.any():
        keys = [uid for uid, bad in zip(uids, broken, strict=True) if bad]
        raise UserError(
            f"{name} features of {len(keys)} samples are not finite or too large for float16: {', '.join(keys[:10])}; "
            "look at these pictures, or train again if the model diverged"
        )
    return stored


def _sorted_samples(shards: Path) -> pa.Table:
    return pq.read_table(shards / SAMPLES).sort_by([("split", "ascending"), ("uid", "ascending")])


@torch.no_grad()
def extract_features(params: Params, shards: Path, model: Path, output: Path) -> None:
    """Write `samples.parquet`, one `.npy` per set with the same rows sorted by (split, uid), and the cosine index.

    shards: folder of the stage `shard`. model: a checkpoint folder. Raises UserError for a feature that is not finite.
    """
    read_manifest(shards, made_by="shard")
    read_manifest(model, made_by="pretrain")
    device = dist.pick_device(params.compute.device)
    loaded = load_model(model, device)
    version, splits = read_index(shards)["version"], read_index(shards)["splits"]
    samples = _sorted_samples(shards)
    row_of = {uid: row for row, uid in enumerate(samples["uid"].to_pylist())}
    if len(row_of) < samples.num_rows:
        raise UserError(f"{shards / SAMPLES} holds a uid twice; run `mdc stage shard` again")

    pictures = [""] * len(row_of)
    with whole_folder(output) as temporary, tqdm(total=len(row_of), desc="features", unit="image") as progress:
        arrays: dict[str, np.ndarray] = {}
        encoders = _encoders(params, loaded, device)
        for split in splits:
            dataset = ShardDataset(shards, split)
            pad_id, workers = loaded.config.vocabulary.pad_id, params.compute.workers
            for batch in eval_batches(dataset, params.extract.batch_size, pad_id, workers):
                rows = [row_of[uid] for uid in batch.uids]
                images_BCHW = batch.images_BCHW.to(device)
                for name, encode in encoders.items():
                    stored = as_float16(encode(images_BCHW), name, batch.uids)
                    if name not in arrays:
                        shape = (len(row_of), stored.shape[1])
                        arrays[name] = np.lib.format.open_memmap(
                            temporary / f"{name}.npy", mode="w+", dtype=np.float16, shape=shape
                        )
                    arrays[name][rows] = stored
                for row, image_CHW in zip(rows, batch.images_BCHW, strict=True):
                    pictures[row] = hashlib.sha256(image_CHW.numpy().tobytes()).hexdigest()[:16]
                progress.update(len(rows))
        if "" in pictures:
            raise UserError(f"{shards / SAMPLES} lists samples that no shard holds; run `mdc stage shard` again")
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        pq.write_table(samples.append_column("picture", [pictures]).select(COLUMNS), temporary / SAMPLES)
        CosineIndex.build(samples["uid"].to_pylist(), arrays["model"], loaded.fingerprint).save(temporary / INDEX)
        write_manifest(
            temporary,
            inputs={
                "shards": sha256(shards / MANIFEST),
                "model": sha256(model / MANIFEST),
                "params": params.extract.model_dump(mode="json"),
            },
            counts={"rows": len(row_of), **{name: array.shape[1] for name, array in arrays.items()}},
            fingerprint=loaded.fingerprint,
            version=version,
        )


class Viewer:
    """Patch features of pictures by uid, made when they are asked for."""

    def __init__(self, loaded: LoadedModel, shards: Path, splits: Iterable[str], device: torch.device) -> None:
        self._loaded, self._device = loaded, device
        self._datasets = [ShardDataset(shards, split) for split in splits]
        self._places = {uid: (d, i) for d in self._datasets for i, uid in enumerate(d.uids)}

    def __len__(self) -> int:
        return len(self._places)

    @torch.no_grad()
    def patches(self, uids: Sequence[str]) -> Tensor:
        """`[M, P, D]` on the device."""
        images = [dataset.images([place])[0] for dataset, place in (self._places[uid] for uid in uids)]
        size = self._loaded.config.pretrain.image_size
        return self._loaded.model.encode(eval_images(torch.stack(images).to(self._device), size))  # type: ignore[operator]

    def mean_patches(self, batch_size: int) -> Tensor:
        """`[P, D]`: the mean over all pictures, which stands for "no picture" in blind scores."""
        uids = list(self._places)
        parts = [self.patches(uids[i : i + batch_size]).double().sum(0) for i in range(0, len(uids), batch_size)]
        return (torch.stack(parts).sum(0) / len(uids)).float()
