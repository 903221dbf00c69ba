"""Photographs with captions, as img2dataset leaves them and as mdc's shard stage leaves the same bytes.

The photographs come with installed packages. Each picture is a crop of one, at another size, with other colours and a
little noise, so that no two files are alike and none is smoother than a photograph.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sklearn.datasets
from img2dataset.resizer import Resizer
from img2dataset.writer import WebDatasetSampleWriter
from PIL import Image

from bench.loader import STORED
from mdc.data.columns import FOLDER as COLUMNS
from mdc.data.columns import write_columns
from mdc.data.shards import FORMAT, INDEX, SAMPLES, SAMPLES_SCHEMA
from mdc.data.tars import FixedTar, members
from mdc.files import write_json

PER_SHARD = 512
WORDS = "a photograph of two people with an old red boat near the green river under some clouds".split()  # noqa: SIM905


def _photographs() -> list[Image.Image]:
    folder = Path(sklearn.datasets.__file__).parent / "images"
    paths = [folder / "china.jpg", folder / "flower.jpg"]
    paths.append(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    return [Image.open(path).convert("RGB") for path in paths]


def crops(count: int) -> Iterator[Image.Image]:
    """Pictures of at least STORED pixels a side."""
    photographs, generator = _photographs(), np.random.Generator(np.random.PCG64(0))
    noise_HWC = generator.normal(0, 2, (1024, 1024, 3))
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        width, height = (int(generator.integers(STORED, side + 1)) for side in photograph.size)
        left = int(generator.integers(0, photograph.width - width + 1))
        top = int(generator.integers(0, photograph.height - height + 1))
        crop = photograph.crop((left, top, left + width, top + height))
        left, top = generator.integers(0, len(noise_HWC) - max(width, height) + 1, 2)
        pixels_HWC = np.asarray(crop) * generator.uniform(0.7, 1.2, 3)
        pixels_HWC += noise_HWC[top : top + height, left : left + width]
        yield Image.fromarray(pixels_HWC.clip(0, 255).astype(np.uint8))


def _captions(count: int) -> Iterator[str]:
    generator = np.random.Generator(np.random.PCG64(1))
    for _ in range(count):
        yield " ".join(generator.choice(WORDS, generator.integers(6, 20)))


def write_img2dataset(folder: Path, count: int) -> None:
    """`count` pictures by img2dataset's own resizer and writer, with its defaults: shorter side STORED, quality 95."""
    folder.mkdir()
    resizer = Resizer(STORED, "keep_ratio", resize_only_if_bigger=False)
    schema = pa.schema([("key", pa.string()), ("caption", pa.string())])
    pairs = zip(crops(count), _captions(count), strict=True)
    for shard in range(-(-count // PER_SHARD)):
        writer = WebDatasetSampleWriter(shard, str(folder), True, 5, schema, "jpg")
        for number in range(shard * PER_SHARD, min((shard + 1) * PER_SHARD, count)):
            picture, caption = next(pairs)
            source = io.BytesIO()
            picture.save(source, "BMP")
            source.seek(0)
            data, *_, error = resizer(source)
            assert error is None, error
            key = f"{number:09d}"
            writer.write(data, key, caption, {"key": key, "caption": caption})
        writer.close()


def write_ours(folder: Path, theirs: Path) -> None:
    """The same pictures, byte for byte, in shards as the shard stage writes them."""
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    records = []
    for path in sorted(theirs.glob("*.tar")):
        name = f"train-{path.stem}.tar"
        before = len(rows)
        with (folder / name).open("wb") as file:
            tar = FixedTar(file)
            for uid, picture, caption in pairs_of(path):
                words = [5 + WORDS.index(word) for word in caption.split()] + [3]
                image = tar.add(f"{uid}.jpg", picture)
                note = tar.add(f"{uid}.json", json.dumps({"uid": uid, "caption": caption, "tokens": words}).encode())
                row: dict[str, Any] = {"uid": uid, "split": "train", "shard": name, "tokens": words, "caption": caption}
                row |= {"image_offset": image.offset, "image_bytes": image.size}
                row |= {"json_offset": note.offset, "json_bytes": note.size}
                rows.append({**dict.fromkeys(SAMPLES_SCHEMA.names), **row})
            tar.close()
        size = (folder / name).stat().st_size
        records.append({"file": name, "samples": len(rows) - before, "bytes": size, "sha256": ""})
    pq.write_table(pa.Table.from_pylist(rows, SAMPLES_SCHEMA), folder / SAMPLES)
    write_columns(folder / SAMPLES, folder / COLUMNS)
    splits = {"train": records, "validation": [], "test": []}
    index = {"format": FORMAT, "version": "bench", "image_format": "jpg", "location": "", "splits": splits}
    write_json(folder / INDEX, index)


def pairs_of(tar: Path) -> Iterator[tuple[str, bytes, str]]:
    """Uid, picture and caption of each sample of one of img2dataset's tars."""
    data = tar.read_bytes()
    files = {member.name: data[member.offset : member.offset + member.size] for member in members(tar)}
    for name in files:
        if name.endswith(".jpg"):
            uid = name.removesuffix(".jpg")
            yield uid, files[name], files[f"{uid}.txt"].decode()
