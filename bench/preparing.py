"""From downloaded bytes and captions to shards, against the least that the work needs."""

import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from bench.frame import Result, in_turn, rates
from bench.loader import STORED
from bench.pictures import crops
from mdc.config import CaptionParams, DownloadParams, ShardParams
from mdc.data.alike import DECISION_SCHEMA
from mdc.data.captions import clean_rows, finish_rows, prepare_captions
from mdc.data.images import store
from mdc.data.packing import write_shards
from mdc.data.parts import PART_SCHEMA
from mdc.data.tars import FixedTar
from mdc.data.tokenizer import CaptionTokenizer
from mdc.files import write_json

CAPTIONS = 50_000
WORDS = 3000  # different ones, the first of them most often
PICTURES = 1000
ROUNDS = 5


def _captions(count: int) -> list[str]:
    """Of 6 to 19 words."""
    random = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    words = np.array(["".join(random.choice(letters, random.integers(2, 9))) for _ in range(WORDS)])
    return [" ".join(words[(WORDS * random.random(random.integers(6, 20)) ** 3).astype(int)]) for _ in range(count)]


def _tokens() -> Result:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in each of several workers
    captions = _captions(CAPTIONS)
    params = CaptionParams(max_tokens=64, vocab_size=8000)
    tokenizer = CaptionTokenizer.train(captions[:5000], params.vocab_size, lowercase=True)
    uids = [f"{number:012d}" for number in range(len(captions))]
    listed = pa.table({"uid": uids, "label": [""] * len(uids), "caption": captions})
    groups = [f"content {uid}" for uid in uids]
    decisions = pa.table({"uid": uids, "group": groups, "reason": [""] * len(uids)}, schema=DECISION_SCHEMA)

    def ours() -> None:
        cleaned = clean_rows(listed, params)
        rows = pa.table({"uid": listed["uid"], "label": listed["label"], "captions": cleaned["captions"]})
        finish_rows(rows, decisions, tokenizer, params)

    def theirs() -> None:
        _ = [row.ids for row in tokenizer._tokenizer.encode_batch_fast(captions, add_special_tokens=False)]

    taken = in_turn({"ours": ours, "theirs": theirs}, ROUNDS)
    return Result(
        row="preparing",
        work="captions cleaned, filtered, tokenised and split",
        against="`tokenizers`' batch encoding alone",
        unit="captions/s",
        ours=rates(CAPTIONS, taken["ours"]),
        theirs=rates(CAPTIONS, taken["theirs"]),
        aim=0.8,
        compared="one thread each; ours also writes the texts one way, filters, counts, splits and makes a table",
    )


def _sent() -> list[bytes]:
    pictures = []
    for picture in crops(PICTURES):
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=85)
        pictures.append(buffer.getvalue())
    return pictures


def _download(sent: Sequence[bytes], folder: Path, params: DownloadParams) -> None:
    """The pixel work of the download stage, and its part."""
    folder.mkdir()
    captions, rows = _captions(len(sent)), []
    with (folder / "00000.tar").open("wb") as file:
        tar = FixedTar(file)
        for number, data in enumerate(sent):
            uid = f"{number:012d}"
            tar.add(f"{uid}.jpg", store(data, params).data)
            row = {"uid": uid, "caption": captions[number], "label": "", "group": "", "status": "ok", "sha256": uid}
            rows.append(row)
        tar.close()
    pq.write_table(pa.Table.from_pylist(rows, PART_SCHEMA), folder / "00000.parquet")
    write_json(folder / "manifest.json", {"inputs": {}, "counts": {}, "files": {}})


def _shards() -> Result:
    sent, params = _sent(), DownloadParams(image_size=STORED)
    captioning = CaptionParams(max_tokens=64, validation_share=0.0, test_share=0.0, alike_bits=-1)
    with tempfile.TemporaryDirectory() as scratch:
        prepared = Path(scratch)
        _download(sent, prepared / "downloaded", params)
        prepare_captions(captioning, prepared / "downloaded", prepared / "captions")

        def ours() -> None:
            with tempfile.TemporaryDirectory(dir=prepared) as folder:
                _download(sent, Path(folder) / "downloaded", params)
                write_shards(ShardParams(), Path(folder) / "downloaded", prepared / "captions", Path(folder) / "shards")

        def theirs() -> None:
            for data in sent:
                with Image.open(io.BytesIO(data)) as image:
                    width, height = image.size
                    scale = STORED / min(width, height)
                    size = (round(width * scale), round(height * scale))
                    small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
                small.save(io.BytesIO(), "JPEG", quality=params.image_quality, subsampling=0)

        taken = in_turn({"ours": ours, "theirs": theirs}, ROUNDS)
    return Result(
        row="preparing",
        work=f"JPEG files to shards of pictures of {STORED} pixels",
        against="Pillow's decode, resize and encode alone",
        unit="images/s",
        ours=rates(PICTURES, taken["ours"]),
        theirs=rates(PICTURES, taken["theirs"]),
        aim=0.8,
        compared="ours is the pixel work of the download stage, checks included, and the whole shard stage: the plan, "
        "the global shuffle, the tars with captions and tokens on disk, checksums, and reading back",
    )


def measure() -> list[Result]:
    return [_tokens(), _shards()]
