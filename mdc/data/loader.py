"""Batches from shards: which samples a step sees is a function of (data version, seed, step) and of nothing else.

B: batch, C: channels, H: height, W: width, L: longest caption of the batch.
"""

import io
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mdc.config import choose, pairs_in_share
from mdc.data.shards import SAMPLES, read_index
from mdc.draws import derive_seed
from mdc.errors import UserError

CACHE_BYTES = 2**29  # of decoded pictures kept in memory by each rank


@dataclass(frozen=True)
class Batch:
    """Rows `first .. first + B` of a global batch of `total` rows."""

    images_BCHW: Tensor  # uint8, square, at the stored size
    tokens_BL: Tensor  # int64, filled up with the pad id
    lengths_B: Tensor  # int64, real tokens, the end token included
    uids: list[str]
    first: int
    total: int
    step: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch with its tensors on `device`; the copy runs beside the computation where that is possible."""
        tensors = {name: getattr(self, name) for name in ("images_BCHW", "tokens_BL", "lengths_B")}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def centre_square(pixels_HWC: np.ndarray) -> np.ndarray:
    height, width = pixels_HWC.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels_HWC[top : top + side, left : left + side]


def within_share(uids: list[str], share: float) -> list[bool]:
    """Which samples belong to a share of all: those with the smallest hashes of their uids.

    So a smaller share lies within every larger one, and neither order nor seed changes it.
    """
    count = pairs_in_share(len(uids), share)
    chosen = set(sorted(uids, key=lambda uid: derive_seed("data share", uid))[:count])
    return [uid in chosen for uid in uids]


class ShardDataset(Dataset[tuple[Tensor, list[int], str]]):
    """The samples of one split in shard order, read by offset.

    samples: pyarrow table, one row per sample, with the columns of `samples.parquet`.
    """

    def __init__(self, folder: Path, split: str, cache_bytes: int = CACHE_BYTES, share: float = 1.0) -> None:
        """split: train, validation or test. cache_bytes: decoded pictures are kept if all of them fit into this.
        share: of the samples, see `within_share`.
        """
        index = read_index(folder)
        choose("split", split, index["splits"])
        table = pq.read_table(folder / SAMPLES)
        self.folder = folder
        self.split = split
        self.version: str = index["version"]
        table = table.filter(pc.equal(table["split"], split))
        if share < 1:
            table = table.filter(pa.array(within_share(table["uid"].to_pylist(), share), pa.bool_()))
        self.samples: pa.Table = table.combine_chunks()
        self.uids: list[str] = self.samples["uid"].to_pylist()
        self._shards: list[str] = self.samples["shard"].to_pylist()
        self._offsets = self.samples["image_offset"].to_numpy()
        self._sizes = self.samples["image_bytes"].to_numpy()
        tokens = self.samples["tokens"].combine_chunks()
        self._tokens = torch.from_numpy(tokens.flatten().to_numpy(zero_copy_only=False).astype(np.int64))
        self.lengths = torch.from_numpy(pc.list_value_length(tokens).to_numpy(zero_copy_only=False).astype(np.int64))
        self._starts = torch.cumsum(self.lengths, 0) - self.lengths
        self._cache_NCHW = self._decode_all(cache_bytes)

    def __len__(self) -> int:
        return len(self.uids)

    def __getitem__(self, index: int) -> tuple[Tensor, list[int], str]:
        """Image uint8 `[C, H, W]`, token ids without padding, and uid."""
        start, length = int(self._starts[index]), int(self.lengths[index])
        return self.images([index])[0], self._tokens[start : start + length].tolist(), self.uids[index]

    @property
    def is_cached(self) -> bool:
        """Whether the pictures are in memory, so that loader processes have nothing to do."""
        return self._cache_NCHW is not None

    def image_bytes(self, index: int) -> bytes:
        """The encoded picture as it lies in the shard."""
        with (self.folder / self._shards[index]).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), int(self._sizes[index]), int(self._offsets[index]))

    def images(self, indices: list[int]) -> Tensor:
        """uint8 `[B, C, H, W]`: the centre square of each picture at its stored size."""
        if self._cache_NCHW is not None:
            return torch.from_numpy(self._cache_NCHW.take(indices, 0))  # one thread: the cores are the model's
        return torch.from_numpy(np.stack([self._decode(index) for index in indices]))

    def tokens(self, indices: list[int], pad_id: int) -> tuple[Tensor, Tensor]:
        """int64 `[B, L]` filled up with `pad_id`, and the lengths `[B]`."""
        lengths_B = self.lengths[torch.tensor(indices)]
        positions_L = torch.arange(int(lengths_B.max()))
        at_BL = self._starts[torch.tensor(indices)][:, None] + positions_L
        real_BL = positions_L < lengths_B[:, None]
        return torch.where(real_BL, self._tokens[at_BL.clamp(max=len(self._tokens) - 1)], pad_id), lengths_B

    def batch(self, indices: list[int], pad_id: int, first: int, total: int, step: int) -> Batch:
        tokens_BL, lengths_B = self.tokens(indices, pad_id)
        uids = [self.uids[index] for index in indices]
        return Batch(self.images(indices), tokens_BL, lengths_B, uids, first, total, step)

    def _decode(self, index: int) -> np.ndarray:
        with Image.open(io.BytesIO(self.image_bytes(index))) as image:
            return centre_square(np.asarray(image)).transpose(2, 0, 1)

    def _decode_all(self, cache_bytes: int) -> np.ndarray | None:
        if not self.uids:
            return None
        first_CHW = self._decode(0)
        if first_CHW.nbytes * len(self) > cache_bytes:
            return None
        cache_NCHW = np.empty((len(self), *first_CHW.shape), np.uint8)
        for index in range(len(self)):
            cache_NCHW[index] = self._decode(index)
        return cache_NCHW


class _Jobs(Dataset[Batch]):
    """Batches by number, for loader processes."""

    def __init__(self, loader: "TrainLoader") -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, number: int) -> Batch:
        return self._loader.batch(number)


def _leave_signals_to_the_rank(_worker: int) -> None:
    """A signal to the whole process group must not take the data away from a rank that is about to save its state."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class TrainLoader:
    """The batches of a range of steps, as this rank sees them.

    The samples stand in one endless line: epoch after epoch, each in an order drawn from (seed, epoch). Step s takes
    samples s * batch_size .. (s + 1) * batch_size of it. Micro-batch a of rank r holds the rows from
    (a * world + r) * rows on, so that the union over micro-batches and ranks is the same for any layout.

    Iterating yields `accumulate` batches per step, one after the other: step, micro-batch, `Batch.first` ascending.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        batch_size: int,
        seed: int,
        steps: range,
        pad_id: int,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        workers: int = 0,
    ) -> None:
        """batch_size: images per step over all ranks. steps: numbers of the steps, from 0. workers: loader processes;
        they change nothing in the batches, and none are started where the pictures are in memory.
        """
        if not len(dataset):
            raise UserError(f"{dataset.folder}: split {dataset.split!r} has no samples; change caption.*_share")
        if batch_size % (world * accumulate):
            raise UserError(f"batch_size {batch_size} does not divide over {world} ranks x {accumulate} micro-batches")
        self.dataset = dataset
        self.steps = steps
        self.rows = batch_size // (world * accumulate)
        self._batch_size = batch_size
        self._seed = seed
        self._pad_id = pad_id
        self._rank = rank
        self._world = world
        self._accumulate = accumulate
        self._workers = 0 if dataset.is_cached else workers
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def __len__(self) -> int:
        """Number of micro-batches."""
        return len(self.steps) * self._accumulate

    def __iter__(self) -> Iterator[Batch]:
        if not self._workers:
            return (self.batch(number) for number in range(len(self)))
        loader = DataLoader(
            _Jobs(self),
            batch_size=None,
            shuffle=False,
            num_workers=self._workers,
            prefetch_factor=4,
            worker_init_fn=_leave_signals_to_the_rank,
        )
        return iter(loader)

    def batch(self, number: int) -> Batch:
        """Micro-batch `number`, counted from the first of the first step."""
        step = self.steps[number // self._accumulate]
        first = (number % self._accumulate * self._world + self._rank) * self.rows
        start = step * self._batch_size + first
        indices = [self._sample(position) for position in range(start, start + self.rows)]
        return self.dataset.batch(indices, self._pad_id, first, self._batch_size, step)

    def _sample(self, position: int) -> int:
        epoch, place = divmod(position, len(self.dataset))
        return self._order(epoch)[place]

    def _draw_order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "epoch", epoch))
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._order = lru_cache(maxsize=2)(self._draw_order)


def eval_batches(dataset: ShardDataset, batch_size: int, pad_id: int) -> Iterator[Batch]:
    """Every sample once, in shard order; the last batch may be smaller. `total` is the size of the split."""
    for step, start in enumerate(range(0, len(dataset), batch_size)):
        indices = list(range(start, min(start + batch_size, len(dataset))))
        yield dataset.batch(indices, pad_id, start, len(dataset), step)
