"""A small labelled world for several folders of tests: shards of coloured pictures whose class is their colour."""

import io
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from mdc.config import ShardParams
from mdc.data.captions import SCHEMA
from mdc.data.packing import write_shards
from mdc.data.tars import FixedTar
from mdc.data.tokenizer import CaptionTokenizer
from mdc.files import write_manifest

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 60, 220)}
THINGS = ["circle", "square", "star", "moon", "tree", "house", "boat", "fish", "bird", "lamp", "door", "sock"]
SPLIT_OF = {"lamp": "validation", "door": "validation", "sock": "test", "bird": "test", "fish": "test"}


def write_world(folder: Path, labelled: bool = True) -> Path:
    """Two pictures of each colour and thing; their class is the colour. A thing is in one split, as a group."""
    downloaded, captions = folder / "downloaded", folder / "captions"
    downloaded.mkdir(parents=True)
    captions.mkdir()
    named = [f"{colour} {thing}" for colour, thing in itertools.product(COLOURS, THINGS)]
    tokenizer = CaptionTokenizer.train(named, vocab_size=200, lowercase=True)
    tokenizer.save(captions / "tokenizer.json")
    random = np.random.default_rng(0)
    rows = []
    with (downloaded / "00000.tar").open("wb") as file:
        tar = FixedTar(file)
        for number, text in enumerate(named * 2):
            uid, (colour, thing) = f"u{number:03d}", text.split()
            picture = io.BytesIO()
            noise = random.integers(-60, 60, (12, 12, 3))
            pixels = np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(picture, "png")
            tar.add(f"{uid}.png", picture.getvalue())
            row = {"uid": uid, "caption": text, "label": colour if labelled else "", "group": thing}
            row |= {"split": SPLIT_OF.get(thing, "train"), "tokens": tokenizer.encode([text])[0]}
            rows.append({**row, "kept": True, "reason": ""})
        tar.close()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), captions / "captions.parquet")
    write_manifest(downloaded, {}, {})
    write_manifest(captions, {}, {})
    write_shards(ShardParams(samples_per_shard=30), downloaded, captions, folder / "shards")
    return folder / "shards"
