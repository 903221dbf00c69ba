"""Pictures of the shards, read by offset, as data URIs for a page that fetches nothing."""

import base64
import io
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

from mdc.data.shards import read_index
from mdc.data.storage import tar_folder
from mdc.errors import UserError

LARGEST = 224  # pixels of the longer side; larger pictures are shown smaller, to keep the page small
MEDIA_TYPES = {"jpg": "image/jpeg", "png": "image/png", "webp": "image/webp"}


@dataclass(frozen=True)
class Picture:
    """A picture as the page shows it, with the caption and the tokens that it has in the data."""

    uri: str
    width: int  # pixels
    height: int
    caption: str
    tokens: list[int]


class Pictures:
    """Some pictures of a shards folder by uid."""

    def __init__(self, shards: Path, pictures: dict[str, Picture]) -> None:
        self._shards = shards
        self._pictures = pictures

    @classmethod
    def read(cls, shards: Path, uids: Collection[str], image_format: str) -> "Pictures":
        rows = pq.read_table(
            shards / "samples.parquet",
            columns=["uid", "shard", "image_offset", "image_bytes", "caption", "tokens"],
            filters=[("uid", "in", sorted(uids))],
        ).to_pylist()
        pictures, tars = {}, tar_folder(shards, read_index(shards))
        for row in rows:
            with (tars / row["shard"]).open("rb") as shard:
                encoded = os.pread(shard.fileno(), row["image_bytes"], row["image_offset"])
            uri, size = _data_uri(encoded, MEDIA_TYPES[image_format])
            pictures[row["uid"]] = Picture(uri, *size, row["caption"], row["tokens"])
        return cls(shards, pictures)

    def __getitem__(self, uid: str) -> Picture:
        if uid not in self._pictures:
            raise UserError(
                f"{self._shards} has no sample {uid!r}, which the evaluation shows: the scores belong to other shards; "
                "run `mdc stage extract`, then `mdc stage evaluate`"
            )
        return self._pictures[uid]


def _data_uri(encoded: bytes, media_type: str) -> tuple[str, tuple[int, int]]:
    """The picture as a URI that holds it, and its width and height; large ones are made smaller."""
    with Image.open(io.BytesIO(encoded)) as image:
        size = image.size
        if max(size) > LARGEST:
            image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, "jpeg", quality=85)
            encoded, media_type, size = buffer.getvalue(), "image/jpeg", image.size
    return f"data:{media_type};base64,{base64.b64encode(encoded).decode()}", size
