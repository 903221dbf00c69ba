"""Frozen features, read once by everything that follows: one row per sample, in one order, as float16 on disk.

Three sets: the mean of the trained encoder's patch features; the same of the encoder before its first update; raw
pixels. The last two are the floors that the first must beat. Each is kept by a hash of weights, transform and data, see
`mdc.eval.kept`, and linked to.

Letters: B batch, C channels, H W image size, P patches, D width, N samples.
"""

import hashlib
import os
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors.torch import save
from torch import Tensor, nn

from mdc import dist
from mdc.config import ExtractParams, ModelConfig, Params
from mdc.data.captions import SPLITS
from mdc.data.loader import Batch, ShardDataset, made_ahead
from mdc.data.shards import SAMPLES, read_index
from mdc.data.transforms import eval_images
from mdc.data.work import place
from mdc.errors import UserError
from mdc.eval.index import CosineIndex
from mdc.eval.kept import ROWS, Block, RowSet, absent, keep, make_room, places, reserved
from mdc.files import MANIFEST, read_json, read_manifest, sha256, whole_folder, write_json, write_manifest
from mdc.processes import is_first_rank
from mdc.ranks import run_module
from mdc.train.checkpoint import LoadedModel, load_model, untrained_model

INDEX = "index"
SETS = ("model", "untrained", "pixels")
PICTURE = "picture"  # one more set: a hash of each picture's pixels
COLUMNS = ("uid", "split", "label", "caption", "group", PICTURE)
DIGEST_BYTES = 8
TARGET = "mdc.eval"  # the module that each rank runs


@dataclass(frozen=True)
class Features:
    """What `extract_features` wrote.

    samples: one row per sample, with `COLUMNS` as strings, "" for a missing one. arrays: `[N, D]` float16 by set.
    layer: the block of the encoder that they come from; None is the last.
    """

    samples: pd.DataFrame
    arrays: Mapping[str, np.ndarray]
    fingerprint: str  # of the model
    index: CosineIndex
    layer: int | None = None


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
    index = CosineIndex.load(folder / INDEX)
    return Features(samples, arrays, manifest["fingerprint"], index, manifest.get("layer"))


class Seen(NamedTuple):
    """uint8 pictures as they are stored, in the host's memory and on the device."""

    host_BCHW: Tensor
    device_BCHW: Tensor


class ShardPictures:
    """All pictures of the stage `shard`, split after split in blocks that follow the shards; see `kept.Pictures`.

    Their rows are sorted by (split, uid).
    """

    def __init__(self, shards: Path, batch_size: int, workers: int, device: torch.device) -> None:
        """batch_size: pictures of a block. workers: loader processes; they change nothing."""
        self.mark: str = read_index(shards)["version"]
        self._workers, self._device = workers, device
        listed = pq.read_table(shards / SAMPLES, columns=["split", "uid"])  # in the order of the shards
        self._uids = listed["uid"]
        order = pc.sort_indices(listed, sort_keys=[("split", "ascending"), ("uid", "ascending")]).to_numpy()
        self._rows = np.empty(len(order), np.int64)
        self._rows[order] = np.arange(len(order))
        self._blocks: list[tuple[ShardDataset, int, np.ndarray]] = []  # with the first sample, and those of its split
        first = 0
        for split in SPLITS:
            dataset = ShardDataset(shards, split, cache_bytes=0)  # each picture is read once
            for start in range(0, len(dataset), batch_size):
                self._blocks.append((dataset, first, np.arange(start, min(start + batch_size, len(dataset)))))
            first += len(dataset)
        if first < len(order):
            raise UserError(f"{shards / SAMPLES} lists samples that no shard holds; run `mdc stage shard` again")
        if pc.count_distinct(self._uids).as_py() < len(order):
            raise UserError(f"{shards / SAMPLES} holds a uid twice; run `mdc stage shard` again")

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: range) -> Generator[Block[Seen], None, None]:
        with closing(made_ahead(lambda place: self._batch(numbers[place]), len(numbers), self._workers)) as batches:
            for number, batch in zip(numbers, batches, strict=True):
                _, first, indices = self._blocks[number]
                assert batch.uids == self._uids.take(first + indices).to_pylist()
                seen = Seen(batch.images_BCHW, dist.to_device(batch.images_BCHW, self._device))
                yield Block(self._rows[first + indices], batch.uids, seen)

    def _batch(self, number: int) -> Batch:
        dataset, _, indices = self._blocks[number]
        return dataset.batch(indices, 0, int(indices[0]), len(dataset), number)


@torch.no_grad()
def _mean_patch(model: nn.Module, size: int, layer: int | None, seen: Seen) -> Tensor:
    return model.encode(eval_images(seen.device_BCHW, size), layer).mean(1)  # type: ignore[operator]


def _pixels(size: int, seen: Seen) -> Tensor:
    return eval_images(seen.device_BCHW, size).flatten(1)


def _digests(seen: Seen) -> np.ndarray:
    pixels = [image_CHW.numpy().tobytes() for image_CHW in seen.host_BCHW]
    digests = b"".join(hashlib.sha256(each).digest()[:DIGEST_BYTES] for each in pixels)
    return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)


def _encoder_mark(model: nn.Module, config: ModelConfig) -> dict[str, Any]:
    """What decides an encoder's features: its weights, its architecture and how pictures come to it."""
    weights = {name: tensor.cpu().contiguous() for name, tensor in model.encoder.state_dict().items()}  # type: ignore[union-attr]
    architecture = config.pretrain.model_dump(include={"encoder", "encoder_options", "image_size"})
    return {**architecture, "weights": hashlib.sha256(save(weights)).hexdigest()}


class Extraction:
    """The sets of features that are asked for, and the folders where they are kept, by name."""

    def __init__(self, params: Params, shards: Path, model: Path, cache: Path) -> None:
        """model: a checkpoint folder. Raises UserError for a layer that it lacks, and shards that are not whole."""
        extract = params.extract
        self.device = dist.pick_device(params.compute.device)
        self.loaded = load_model(model)
        try:
            self.layer = self.loaded.model.encoder.block(extract.layer)  # type: ignore[union-attr,operator]
        except UserError as error:
            raise UserError(f"extract.{error}") from None
        self._models = {"model": self.loaded.model}
        if extract.floors:
            self._models["untrained"] = untrained_model(self.loaded.config, self.loaded.config.pretrain.seed)
        self._pictures = ShardPictures(shards, extract.batch_size, params.compute.workers, self.device)
        self._sets = self._rows(extract)
        self._cache = cache
        self.folders = dict(zip(self._sets, places(list(self._sets.values()), self._pictures, cache), strict=True))

    def _rows(self, extract: ExtractParams) -> dict[str, RowSet[Seen]]:
        how = {"batch_size": extract.batch_size, "device": self.device.type}  # which decide the last bits
        sets: dict[str, RowSet[Seen]] = {}
        for name, model in self._models.items():
            mark = {**how, **_encoder_mark(model, self.loaded.config), "layer": self.layer, "pooling": "mean"}
            make = partial(_mean_patch, model, self.loaded.config.pretrain.image_size, self.layer)
            sets[name] = RowSet(f"{name} features", mark, make)
        if extract.floors:
            mark = {**how, "pixel_size": extract.pixel_size}
            sets["pixels"] = RowSet("pixels", mark, partial(_pixels, extract.pixel_size))
        sets[PICTURE] = RowSet("picture hashes", {"sha256": DIGEST_BYTES}, _digests)
        return sets

    def make(self) -> None:
        """Make what is not kept yet; every rank of the group takes part."""
        for model in self._models.values():
            model.to(self.device)
        keep(list(self._sets.values()), self._pictures, self._cache, "features")


def extract_features(params: Params, shards: Path, model: Path, cache: Path, output: Path) -> None:
    """Write `samples.parquet`, one `.npy` per set with the same rows sorted by (split, uid), and the cosine index.

    shards: folder of the stage `shard`. model: a checkpoint folder. cache: where sets are kept. The pictures are shared
    by `compute.processes` ranks on this host, or by those of torchrun, of which this process is one; the first alone
    writes. Raises UserError for a feature that is not finite, TrainingFailed if a rank fails.
    """
    read_manifest(shards, made_by="shard")
    read_manifest(model, made_by="pretrain")
    extraction = Extraction(params, shards, model, cache)
    is_first = is_first_rank()
    missing = absent(extraction.folders.values()) if is_first else []
    with reserved(missing):
        if "RANK" in os.environ or (missing and params.compute.processes == 1):
            with dist.process_group(extraction.device, params.compute.rank_timeout):
                extraction.make()
        elif missing:
            _make_by_ranks(params, shards, model, cache)
            if absent(missing):
                raise UserError("the source of mdc has changed since this stage was started; run it again")
    if is_first:
        _write(extraction, params, shards, model, output)
        make_room(cache, params.compute.kept_features_gb * 1e9, extraction.folders.values())


def _make_by_ranks(params: Params, shards: Path, model: Path, cache: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # JSON is YAML: ranks read what was checked here
        write_json(Path(scratch) / "params.json", params.model_dump())
        places = {"params": f"{scratch}/params.json", "shards": shards, "model": model, "cache": cache}
        arguments = [word for name, place in places.items() for word in (f"--{name}", str(place))]
        failure = Path(scratch) / "failure.json"
        arguments += ["--failure", str(failure)]
        run_module(TARGET, arguments, params.compute.processes, failure, params.compute.rank_timeout)


def _write(extraction: Extraction, params: Params, shards: Path, model: Path, output: Path) -> None:
    """The folder of the stage, from sets that are kept."""
    folders, loaded = extraction.folders, extraction.loaded
    arrays = {name: np.load(folder / ROWS, mmap_mode="r") for name, folder in folders.items()}
    samples = pq.read_table(shards / SAMPLES, columns=[name for name in COLUMNS if name != PICTURE])
    samples = samples.sort_by([("split", "ascending"), ("uid", "ascending")])
    pictures = [row.tobytes().hex() for row in arrays.pop(PICTURE)]
    with whole_folder(output) as temporary:
        for name in arrays:
            place(folders[name] / ROWS, temporary / f"{name}.npy")
        pq.write_table(samples.append_column(PICTURE, [pictures]).select(COLUMNS), temporary / SAMPLES)
        index = CosineIndex.build(samples["uid"].to_pylist(), arrays["model"], loaded.mark(extraction.layer))
        index.save(temporary / INDEX)
        write_manifest(
            temporary,
            inputs={
                "shards": sha256(shards / MANIFEST),
                "model": sha256(model / MANIFEST),
                "params": params.extract.model_dump(mode="json"),
            },
            counts={"rows": len(samples), **{name: array.shape[1] for name, array in arrays.items()}},
            known={f"{name}.npy": read_json(folders[name] / MANIFEST)["files"][ROWS] for name in arrays},
            fingerprint=loaded.fingerprint,
            version=read_index(shards)["version"],
            layer=extraction.layer,
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
