"""Batches from shards: which samples a step sees is a function of (data version, seed, step) and of nothing else.

B: batch, C: channels, H: height, W: width, L: longest caption of the batch, N: samples, S: shards, K: blocks.
"""

import io
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mdc.config import choose, pairs_in_share
from mdc.data.captions import SPLITS
from mdc.data.columns import FOLDER as COLUMNS
from mdc.data.columns import Columns
from mdc.data.shards import SAMPLES, read_index
from mdc.data.storage import tar_folder
from mdc.draws import derive_seed
from mdc.errors import UserError

CACHE_BYTES = 2**29  # of decoded pictures kept in memory by each rank
OPEN_SHARDS = 64  # files that a process keeps open
READ_OVER = 2**16  # bytes: a gap that is read along, since another read would take longer
BATCHES_AHEAD = 4  # made in advance by each loader process
DECODED_AT_ONCE = 256  # pictures, while memory is filled with all of them
LOOKED_AT_ONCE = 2**20  # samples, where all are gone through

Rows = Sequence[int] | np.ndarray


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
    read_s: float = 0.0  # seconds that the process which made the batch spent reading
    decode_s: float = 0.0  # and decoding

    def pin_memory(self) -> "Batch":
        """The same batch with its pictures in memory from which a GPU copies by itself; loaders call this."""
        return replace(self, images_BCHW=self.images_BCHW.pin_memory())


def centre_square(pixels_HWC: np.ndarray) -> np.ndarray:
    height, width = pixels_HWC.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels_HWC[top : top + side, left : left + side]


def within_share(keys: np.ndarray, share: float) -> np.ndarray:
    """Which samples, as bool `[N]`, belong to a share of all: those with the smallest keys, see `columns.share_key`.

    So a smaller share lies within every larger one, and neither order nor seed changes it.
    """
    count = pairs_in_share(len(keys), share)
    return keys <= np.partition(keys, count - 1)[count - 1] if count < len(keys) else np.ones(len(keys), bool)


class _Shard:
    """An open shard. Reads name their place, so that processes may share the file after a fork."""

    def __init__(self, path: Path, number: int) -> None:
        """number: of the open file."""
        self._path, self._number = path, number

    def __del__(self) -> None:
        os.close(self._number)

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._number, size, offset)
        if len(data) < size:
            raise UserError(
                f"{self._path} ends at byte {offset + len(data)}, within a sample that {SAMPLES} lists; "
                "run `mdc stage shard` again"
            )
        return data


def _opened(path: Path) -> _Shard:
    try:
        return _Shard(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; run `mdc stage shard` again") from None


class Run(NamedTuple):
    """Pictures that follow one another in a shard, so that one read brings them."""

    shard: int
    starts_B: np.ndarray  # bytes from the start of the shard, ascending
    ends_B: np.ndarray


class ShardDataset(Dataset[tuple[Tensor, list[int], str]]):
    """The samples of one split in shard order, read by offset.

    Nothing is kept per sample: rows lie in mapped files, see `columns`.
    """

    def __init__(self, folder: Path, split: str, cache_bytes: int = CACHE_BYTES, share: float = 1.0) -> None:
        """split: train, validation or test. cache_bytes: decoded pictures are kept if all of them fit into this.
        share: of the samples, see `within_share`.
        """
        index = read_index(folder)
        choose("split", split, index["splits"])
        self.folder = folder
        self.split = split
        self._tars = tar_folder(folder, index)
        self.version: str = index["version"]
        self._jpeg: bool = index["image_format"] == "jpg"
        self._columns = Columns(folder / COLUMNS)
        before = 0
        for name in SPLITS[: SPLITS.index(split)]:
            before += sum(record["samples"] for record in index["splits"][name])
        self._shards: list[str] = [record["file"] for record in index["splits"][split]]
        sizes_S = [record["samples"] for record in index["splits"][split]]
        self._rows_S1 = before + np.cumsum([0, *sizes_S])  # of the columns, at which the shards start and end
        if self._rows_S1[-1] > len(self._columns):
            raise UserError(f"{folder} lists fewer samples than its index; run `mdc stage shard` again")
        self._chosen_N: np.ndarray | None = None  # rows of a share
        if share < 1 and self._rows_S1[-1] > before:
            keys_N = self._columns.share_key[before : self._rows_S1[-1]]
            self._chosen_N = before + np.flatnonzero(within_share(keys_N, share))
        self._shard = lru_cache(maxsize=OPEN_SHARDS)(_opened)
        self._cache_NCHW: np.ndarray | None = None
        if cache_bytes and len(self):
            self._cache_NCHW = self._decode_all(cache_bytes)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_shard"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._shard = lru_cache(maxsize=OPEN_SHARDS)(_opened)

    def __len__(self) -> int:
        return int(self.shard_bounds[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, list[int], str]:
        """Image uint8 `[C, H, W]`, token ids without padding, and uid."""
        batch = self.batch([index], 0, 0, 1, 0)
        return batch.images_BCHW[0], batch.tokens_BL[0].tolist(), batch.uids[0]

    @property
    def is_cached(self) -> bool:
        """Whether the pictures are in memory, so that loader processes have nothing to do."""
        return self._cache_NCHW is not None

    @cached_property
    def shard_bounds(self) -> np.ndarray:
        """int64 `[S + 1]`: shard s holds the samples `bounds[s] .. bounds[s + 1]` of this dataset."""
        if self._chosen_N is None:
            return self._rows_S1 - self._rows_S1[0]
        return np.searchsorted(self._chosen_N, self._rows_S1)

    @cached_property
    def uids(self) -> list[str]:
        """Of all samples. Made when first asked for: training does without."""
        return self._columns.uids(self._rows(np.arange(len(self))))

    @property
    def lengths(self) -> Tensor:
        """int64 `[N]`: tokens of each caption."""
        parts = [self._lengths(indices) for indices in self._parts(LOOKED_AT_ONCE)]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))

    @property
    def longest(self) -> int:
        """Tokens of the longest caption that a sample may show; 0 for an empty split."""
        longest = 0
        for indices in self._parts(LOOKED_AT_ONCE):
            starts, ends = self._columns.caption_bounds(self._rows(indices))
            token_starts, token_ends = self._columns.token_bounds(np.arange(starts[0], ends[-1]))
            longest = max(longest, int((token_ends - token_starts).max()))
        return longest

    def _lengths(self, indices: np.ndarray) -> np.ndarray:
        starts, ends = self._columns.token_bounds(self._leading(indices))
        return ends - starts

    def _leading(self, indices: Rows) -> np.ndarray:
        """The first caption of each sample, by its number."""
        return self._columns.caption_bounds(self._rows(indices))[0]

    def drawn(self, indices: Rows, visits_B: np.ndarray, seed: int, mix: Mapping[str, float]) -> np.ndarray:
        """One caption of each sample by its number, int64 `[B]`: a function of data version, seed, visit and uid.

        visits_B: of each sample, counted from 0. mix: by source, how often its captions are drawn; those of one source
        share its part; {} = all captions alike. A sample without any caption of the sources named shows its first.
        """
        starts_B, ends_B = self._columns.caption_bounds(self._rows(indices))
        captions_B = starts_B.copy()
        several = np.flatnonzero(ends_B - starts_B > 1)
        for at, uid in zip(several.tolist(), self._columns.uids(self._rows(np.asarray(indices)[several])), strict=True):
            weights = self._weights(self._columns.source[starts_B[at] : ends_B[at]], mix)
            point = derive_seed(self.version, seed, "caption", int(visits_B[at]), uid) / 2**63 * weights.sum()
            if weights.sum() > 0:
                captions_B[at] += np.searchsorted(np.cumsum(weights), point, "right")
        return captions_B

    def _weights(self, sources: np.ndarray, mix: Mapping[str, float]) -> np.ndarray:
        """Of the captions of one sample, by the numbers of their sources."""
        if not mix:
            return np.ones(len(sources))
        parts = np.array([mix.get(name, 0.0) for name in self.sources])
        return parts[sources] / np.bincount(sources, minlength=len(parts))[sources]

    @property
    def sources(self) -> list[str]:
        """Where the captions come from."""
        return self._columns.sources

    def shards_of(self, uids: Sequence[str]) -> list[str]:
        """The shards that hold some samples, by name."""
        table = pq.read_table(self.folder / SAMPLES, columns=["shard"], filters=[("uid", "in", list(uids))])
        return sorted(set(table["shard"].to_pylist()))

    def images(self, indices: Rows) -> Tensor:
        """uint8 `[B, C, H, W]`: the centre square of each picture at its stored size."""
        return self.batch(indices, 0, 0, len(indices), 0).images_BCHW

    def tokens(self, indices: Rows, pad_id: int, captions_B: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """int64 `[B, L]` filled up with `pad_id`, and the lengths `[B]`; of the first captions, or of numbered ones."""
        starts_B, ends_B = self._columns.token_bounds(self._leading(indices) if captions_B is None else captions_B)
        lengths_B = ends_B - starts_B
        positions_L = np.arange(lengths_B.max())
        real_BL = positions_L < lengths_B[:, None]
        tokens_BL = np.full(real_BL.shape, pad_id, np.int64)
        tokens_BL[real_BL] = self._columns.tokens((starts_B[:, None] + positions_L)[real_BL])
        return torch.from_numpy(tokens_BL), torch.from_numpy(lengths_B)

    def batch(
        self,
        indices: Rows,
        pad_id: int,
        first: int,
        total: int,
        step: int,
        captions_B: np.ndarray | None = None,
    ) -> Batch:
        """The samples `indices`, as rows from `first` on of the global batch of a step. captions_B: see `drawn`."""
        tokens_BL, lengths_B = self.tokens(indices, pad_id, captions_B)
        uids = self._columns.uids(self._rows(indices))
        start = time.perf_counter()
        if self._cache_NCHW is not None:
            images_BCHW = torch.from_numpy(self._cache_NCHW.take(indices, 0))  # one thread: the cores are the model's
            return Batch(images_BCHW, tokens_BL, lengths_B, uids, first, total, step, time.perf_counter() - start)
        encoded = list(self._encoded(self._runs(self._rows(indices))))
        read = time.perf_counter()
        images_BCHW = self._decoded(encoded, uids)
        decoded = time.perf_counter()
        return Batch(images_BCHW, tokens_BL, lengths_B, uids, first, total, step, read - start, decoded - read)

    def _rows(self, indices: Rows) -> np.ndarray:
        """Of the columns."""
        indices_B = np.asarray(indices, np.int64)
        return indices_B + self._rows_S1[0] if self._chosen_N is None else self._chosen_N[indices_B]

    def _runs(self, rows_B: np.ndarray) -> Iterator[Run]:
        """Cut a batch where the next picture does not follow in the same shard."""
        shards_B = np.searchsorted(self._rows_S1, rows_B, "right") - 1
        starts_B = self._columns.image_offset[rows_B]
        ends_B = starts_B + self._columns.image_bytes[rows_B]
        gaps = starts_B[1:] - ends_B[:-1]  # captions, and the samples that a share leaves out
        cuts = np.flatnonzero((gaps < 0) | (gaps > READ_OVER) | (np.diff(shards_B) != 0)) + 1
        for shards, starts, ends in zip(*(np.split(part, cuts) for part in (shards_B, starts_B, ends_B)), strict=True):
            yield Run(int(shards[0]), starts, ends)

    def _encoded(self, runs: Iterator[Run]) -> Iterator[memoryview]:
        """The encoded pictures of each run, by one read."""
        for run in runs:
            start = int(run.starts_B[0])
            shard = self._shard(self._tars / self._shards[run.shard])
            data = memoryview(shard.read(start, int(run.ends_B[-1]) - start))
            for first, end in zip((run.starts_B - start).tolist(), (run.ends_B - start).tolist(), strict=True):
                yield data[first:end]

    def _decoded(self, encoded: Sequence[memoryview], uids: Sequence[str]) -> Tensor:
        """uint8 `[B, C, H, W]`, laid out as the decoder leaves it: all channels of a pixel side by side."""
        for number, (data, uid) in enumerate(zip(encoded, uids, strict=True)):
            try:
                pixels_HWC = centre_square(self._decode(data))
            except (ValueError, OSError) as error:  # of simplejpeg, of Pillow
                raise UserError(
                    f"the picture of {uid!r} in {self.folder} is damaged: {error}; run `mdc stage shard` again"
                ) from None
            if not number:
                images_BHWC = _shared((len(encoded), *pixels_HWC.shape))
                into_BHWC = images_BHWC.numpy()
            into_BHWC[number] = pixels_HWC
        return images_BHWC.permute(0, 3, 1, 2)

    def _decode(self, data: memoryview) -> np.ndarray:
        """uint8 `[H, W, C]`. Pillow would give the same pixels of a JPEG, later."""
        if self._jpeg:
            return simplejpeg.decode_jpeg(data, colorspace="RGB")
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image)

    def _decode_all(self, cache_bytes: int) -> np.ndarray | None:
        first_CHW = self.images([0])[0]
        if first_CHW.nbytes * len(self) > cache_bytes:
            return None
        cache_NCHW = np.empty((len(self), *first_CHW.shape), np.uint8)
        for indices in self._parts(DECODED_AT_ONCE):
            cache_NCHW[indices] = self.images(indices).numpy()
        return cache_NCHW

    def _parts(self, size: int) -> Iterator[np.ndarray]:
        """All indices, some at a time."""
        for start in range(0, len(self), size):
            yield np.arange(start, min(start + size, len(self)))


def _shared(shape: tuple[int, ...]) -> Tensor:
    """An empty uint8 tensor; in a loader process in memory that the trainer sees too, so that nothing is copied."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class _Jobs(Dataset[Batch]):
    """Batches by number, for loader processes."""

    def __init__(self, make: Callable[[int], Batch], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Batch:
        return self._make(number)


def _leave_signals_to_the_rank(_worker: int) -> None:
    """A signal to the whole process group must not take the data away from a rank that is about to save its state."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def made_ahead(make: Callable[[int], Batch], count: int, workers: int) -> Generator[Batch, None, None]:
    """make(0), make(1) .. in this order, by `workers` processes of one thread each; by this one if there are none.

    The processes end with the generator, which may be closed before.
    """
    if not workers:
        yield from map(make, range(count))
        return
    loader = DataLoader(
        _Jobs(make, count),
        batch_size=None,
        shuffle=False,
        num_workers=workers,
        prefetch_factor=BATCHES_AHEAD,
        worker_init_fn=_leave_signals_to_the_rank,
        pin_memory=torch.cuda.is_initialized(),  # where this process computes on a GPU
    )
    batches = iter(loader)
    try:
        yield from batches
    finally:
        batches._shutdown_workers()  # type: ignore[attr-defined] # as long as an error is known, Python keeps `batches`


def block_starts(bounds_S1: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """The first sample of every block, ascending, int64 `[K]`. A block ends where the next begins.

    Shards are cut every `size` samples, each from a place of its own that is drawn anew every epoch, so that the same
    samples do not always come together.
    """
    sizes_S = np.diff(bounds_S1)
    shifts_S = generator.integers(1, size, len(sizes_S), endpoint=True)
    blocks_S = np.where(sizes_S > 0, 1 + np.ceil(np.maximum(sizes_S - shifts_S, 0) / size).astype(np.int64), 0)
    shard_K = np.repeat(np.arange(len(sizes_S)), blocks_S)
    number_K = np.arange(len(shard_K)) - np.repeat(np.cumsum(blocks_S) - blocks_S, blocks_S)  # within its shard
    return bounds_S1[shard_K] + np.where(number_K > 0, shifts_S[shard_K] + (number_K - 1) * size, 0)


class EpochOrder:
    """The samples of one epoch: blocks in random order, each in the order in which it is stored."""

    def __init__(self, bounds_S1: np.ndarray, block_samples: int, seed: int, epoch: int) -> None:
        """bounds_S1: see `ShardDataset.shard_bounds`. block_samples: at most, in a block."""
        shifts = np.random.Generator(np.random.PCG64(derive_seed(seed, "blocks", epoch)))
        starts_K = block_starts(bounds_S1, block_samples, shifts)
        lengths_K = np.diff(starts_K, append=bounds_S1[-1])
        generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
        order_K = torch.randperm(len(starts_K), generator=generator).numpy()
        self._ends_K = np.cumsum(lengths_K[order_K])
        self._last_K = starts_K[order_K] + lengths_K[order_K]

    def samples(self, places_B: np.ndarray) -> np.ndarray:
        """The samples at these places of the epoch, int64 `[B]`."""
        block_B = np.searchsorted(self._ends_K, places_B, "right")
        return self._last_K[block_B] - (self._ends_K[block_B] - places_B)


class TrainLoader:
    """The batches of a range of steps, as this rank sees them.

    The samples stand in one endless line: epoch after epoch, each in an order drawn from (seed, epoch). Step s takes
    samples s * batch_size .. (s + 1) * batch_size of it. Micro-batch a of rank r holds the rows from
    (a * world + r) * rows on, so that the union over micro-batches and ranks is the same for any layout. Every rank
    sees the same number of batches, whatever the shards hold.

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
        block_samples: int = 1,
        caption_mix: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """batch_size: images per step over all ranks. steps: numbers of the steps, from 0. workers: loader processes;
        they change nothing in the batches, and none are started where the pictures are in memory. block_samples: that
        lie together in a shard and stay together in an epoch, so that one read brings them; 1 = a full shuffle.
        caption_mix: see `ShardDataset.drawn`.
        """
        if unknown := sorted(set(caption_mix) - set(dataset.sources)):
            raise UserError(
                f"pretrain.caption_mix names {unknown}; the captions of {dataset.folder} come from {dataset.sources}"
            )
        if len(dataset) < world:
            raise UserError(
                f"{dataset.folder}: split {dataset.split!r} has {len(dataset)} samples for {world} ranks; "
                "change caption.*_share or pretrain.data_share, give more data, or use fewer ranks"
            )
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
        self._block_samples = block_samples
        self._caption_mix = dict(caption_mix)
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def __len__(self) -> int:
        """Number of micro-batches."""
        return len(self.steps) * self._accumulate

    def __iter__(self) -> Iterator[Batch]:
        return made_ahead(self.batch, len(self), self._workers)

    def batch(self, number: int) -> Batch:
        """Micro-batch `number`, counted from the first of the first step."""
        step = self.steps[number // self._accumulate]
        first = (number % self._accumulate * self._world + self._rank) * self.rows
        positions_B = step * self._batch_size + first + np.arange(self.rows)
        samples_B = self._samples(positions_B)
        captions_B = self.dataset.drawn(samples_B, positions_B // len(self.dataset), self._seed, self._caption_mix)
        return self.dataset.batch(samples_B, self._pad_id, first, self._batch_size, step, captions_B)

    def _samples(self, positions_B: np.ndarray) -> np.ndarray:
        epochs_B, places_B = np.divmod(positions_B, len(self.dataset))
        parts = [self._order(int(epoch)).samples(places_B[epochs_B == epoch]) for epoch in np.unique(epochs_B)]
        return np.concatenate(parts)

    def _draw_order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.dataset.shard_bounds, self._block_samples, self._seed, epoch)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._order = lru_cache(maxsize=2)(self._draw_order)


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches with their pictures on `device`. To a GPU the next ones are copied while these are worked on."""
    if device.type != "cuda":
        yield from batches
        return
    side, ready = torch.cuda.Stream(device), None
    for batch in batches:
        pinned = batch if batch.images_BCHW.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(side):
            copy_BCHW = pinned.images_BCHW.to(device, non_blocking=True)
            coming = replace(batch, images_BCHW=copy_BCHW), side.record_event()
        if ready is not None:
            yield _taken_over(*ready)
        ready = coming
    if ready is not None:
        yield _taken_over(*ready)


def _taken_over(batch: Batch, copied: torch.cuda.Event) -> Batch:
    """Let the current stream wait for the copy, and the memory live until that stream is done with it."""
    current = torch.cuda.current_stream(batch.images_BCHW.device)
    current.wait_event(copied)
    batch.images_BCHW.record_stream(current)
    return batch


def eval_batches(dataset: ShardDataset, batch_size: int, pad_id: int, workers: int = 0) -> Iterator[Batch]:
    """Every sample once, in shard order; the last batch may be smaller. `total` is the size of the split.

    workers: loader processes; they change nothing in the batches.
    """
    make = partial(_eval_batch, dataset, batch_size, pad_id)
    return made_ahead(make, -(-len(dataset) // batch_size), 0 if dataset.is_cached else workers)


def _eval_batch(dataset: ShardDataset, batch_size: int, pad_id: int, step: int) -> Batch:
    start = step * batch_size
    indices = np.arange(start, min(start + batch_size, len(dataset)))
    return dataset.batch(indices, pad_id, start, len(dataset), step)
