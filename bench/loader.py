"""From shards to the normalised float batch that enters the model: images per second with loader processes.

B: batch, C: channels, H W: image size.
"""

import io
import multiprocessing
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image
from webdataset.tariterators import tar_file_expander

from bench.frame import Growth, Result
from mdc.data.loader import ShardDataset, TrainLoader
from mdc.data.transforms import train_images
from mdc.draws import Draws

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # img2dataset's picture library would ask the internet

STORED = 256  # pixels, shorter side
COUNT = 2048  # pictures
SIZE = 224  # pixels
MIN_AREA = 0.9  # of a crop: open_clip's default
BATCH = 32
BLOCK = 32
WORKERS = 2
SKIPPED, TIMED = 16, 64  # batches; the first fill the queues, and as many are left in them at the end
ROUNDS = 5


def _rate(batches: Iterator[object]) -> float:
    """Images per second while the queues are full."""
    for _ in range(SKIPPED):
        next(batches)
    start = time.perf_counter()
    for _ in range(TIMED):
        next(batches)
    return TIMED * BATCH / (time.perf_counter() - start)


def ours(folder: Path, workers: int, augment: bool) -> float:
    dataset = ShardDataset(folder, "train", cache_bytes=0)
    steps = range(2 * SKIPPED + TIMED)
    loader = TrainLoader(dataset, BATCH, 0, steps, pad_id=0, workers=workers, block_samples=BLOCK)

    def batches() -> Iterator[object]:
        for batch in loader:
            if augment:
                draws = Draws.at(0, batch.step, "augmentation", first=batch.first, total=batch.total)
                yield train_images(batch.images_BCHW, SIZE, MIN_AREA, False, draws)
            else:
                yield batch

    return _rate(batches())


def open_clip(folder: Path) -> float:
    """The training pipeline of its own command, with its own transform and tokenizer."""
    from open_clip import get_tokenizer, image_transform
    from open_clip_train import data as open_clip_data

    # webdataset 0.2 marks the end of each tar with an empty sample, which open_clip does not expect
    open_clip_data.tar_file_expander = partial(tar_file_expander, eof_value=None)
    shards = sorted(folder.glob("*.tar"))
    options = Namespace(
        train_data=f"{folder}/{{{shards[0].stem}..{shards[-1].stem}}}.tar",
        train_data_upsampling_factors=None,
        train_num_samples=(2 * SKIPPED + TIMED) * BATCH,
        dataset_resampled=False,
        workers=WORKERS,
        world_size=1,
        batch_size=BATCH,
        seed=0,
    )
    transform, tokenizer = image_transform(SIZE, is_train=True), get_tokenizer("ViT-B-32")
    return _rate(iter(open_clip_data.get_wds_dataset(options, transform, True, tokenizer=tokenizer).dataloader))


def _crop_box(width: int, height: int, generator: np.random.Generator) -> tuple[float, float, float, float]:
    side = min(width, height) * float(np.sqrt(generator.uniform(MIN_AREA, 1)))
    left, top = generator.uniform(0, width - side), generator.uniform(0, height - side)
    return left, top, left + side, top + side


def _resized_crop(data: bytes, generator: np.random.Generator) -> np.ndarray:
    """What a training does to a picture at the least, by Pillow: decoded, cropped at random, resized; uint8."""
    image = Image.open(io.BytesIO(data))
    box = _crop_box(*image.size, generator)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))


def _cut(data: bytes, generator: np.random.Generator) -> np.ndarray:
    """The least work that there is, by the decoder that mdc uses: decoded, a square cut out and not resized; uint8."""
    pixels_HWC = simplejpeg.decode_jpeg(data)
    top, left = (int(generator.integers(0, side - SIZE + 1)) for side in pixels_HWC.shape[:2])
    return pixels_HWC[top : top + SIZE, left : left + SIZE].copy()


def _work(files: list[bytes], each: Callable[[bytes, np.random.Generator], np.ndarray]) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    for data in files:
        each(data, generator)


def bare(files: list[bytes], each: Callable[[bytes, np.random.Generator], np.ndarray]) -> float:
    """Images per second of WORKERS processes that have all files in memory and hand nothing over."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_work, args=(files[n::WORKERS], each)) for n in range(WORKERS)]
    start = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return len(files) / (time.perf_counter() - start)


def _in_turn(sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            rates[name].append(side())
    return rates


def measure() -> list[Result | Growth]:
    from bench.pictures import pairs_of, write_img2dataset, write_ours

    torch.set_num_threads(1)  # the loader processes have the cores
    with tempfile.TemporaryDirectory() as name:
        theirs, shards = Path(name) / "img2dataset", Path(name) / "shards"
        write_img2dataset(theirs, COUNT)
        write_ours(shards, theirs)
        files = [picture for tar in sorted(theirs.glob("*.tar")) for _, picture, _ in pairs_of(tar)][: TIMED * BATCH]
        rates = _in_turn(
            {
                "ours": lambda: ours(shards, WORKERS, True),
                "open_clip": lambda: open_clip(theirs),
                "resized crop": lambda: bare(files, _resized_crop),
                "uint8": lambda: ours(shards, WORKERS, False),
                "cut": lambda: bare(files, _cut),
                "none": lambda: ours(shards, 0, True),
                "one": lambda: ours(shards, 1, True),
            }
        )
    return _figures(rates)


def _figures(rates: dict[str, list[float]]) -> list[Result | Growth]:
    whole = f"shards to the normalised float batch, {SIZE} px, {WORKERS} workers"
    sides = [
        (
            whole,
            "open_clip's WebDataset pipeline",
            ("ours", "open_clip"),
            2.0,
            f"the same {COUNT} JPEG files, shorter side {STORED}, as img2dataset's resizer and writer leave them. "
            "Theirs: open_clip's get_wds_dataset with its transform and tokenizer. Ours: mdc's loader, and its random "
            "resized crop on the device, here the same two cores, by the main process.",
        ),
        (
            whole,
            "bare decode + crop of the same bytes, 2 processes",
            ("ours", "resized crop"),
            0.8,
            "theirs: Pillow decodes, crops at random and resizes to 224 px; nothing is read, gathered, normalised or "
            "handed over.",
        ),
        (
            "the same up to the uint8 batch, what the host does where a GPU crops",
            "bare decode + crop without resizing",
            ("uint8", "cut"),
            None,
            "theirs: the fastest decoder measured, which mdc uses too, and a square cut out of the picture.",
        ),
    ]
    results: list[Result | Growth] = [
        Result("loader", work, against, "images/s", rates[one], rates[other], aim, compared=compared)
        for work, against, (one, other), aim, compared in sides
    ]
    points = {"0 workers": rates["none"], "1": rates["one"], "2": rates["ours"]}
    return [*results, Growth("loader", "shards to the normalised float batch by loader processes", "images/s", points)]
