"""What training reads of each sample, as plain arrays on disk that all processes of a host share.

One file per column, `NAME.TYPE`, little-endian and without a header, rows in the order of the shards. They are mapped
and not read: opening takes milliseconds for any number of samples, and only the pages that a batch touches come into
memory, once per host.

N: samples, C: captions of all samples, T: tokens of all captions, U: bytes of all uids.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.files import read_json, write_json

FOLDER = "columns"
ROWS_AT_ONCE = 2**16
READ = ["uid", "image_offset", "image_bytes", "tokens", "source", "others"]  # columns of the list of samples
SOURCES = "sources.json"  # where captions come from, by their number in `source`
TYPES = {
    "image_offset": "int64",  # [N] bytes from the start of the shard
    "image_bytes": "int32",  # [N]
    "caption_end": "int64",  # [N] captions of this sample and of all before it
    "source": "uint8",  # [C]
    "token_end": "int64",  # [C] tokens of this caption and of all before it
    "token": "int32",  # [T]
    "uid_end": "int64",  # [N] bytes of this uid and of all before it
    "uid": "uint8",  # [U] UTF-8
    "share_key": "int64",  # [N] see `share_key`
}


def share_key(uid: str) -> int:
    """A number that depends on the uid alone: a share of the data is the samples with the smallest ones."""
    return derive_seed("data share", uid)


def _stored(kind: str) -> np.dtype:
    return np.dtype(kind).newbyteorder("<")


def _ends(lists: pa.Array, before: int) -> np.ndarray:
    """Where each list or string ends, counted over all batches. before: elements of the earlier ones."""
    offsets = np.frombuffer(lists.buffers()[1], np.int32)[lists.offset : lists.offset + len(lists) + 1]
    return offsets[1:].astype(np.int64) - offsets[0] + before


def _captions(batch: pa.RecordBatch) -> tuple[np.ndarray, pa.ListArray, list[str]]:
    """How many captions each sample has, and the tokens and sources of all of them, the leading one first."""
    counts_N = 1 + pc.fill_null(pc.list_value_length(batch["others"]), 0).to_numpy().astype(np.int64)
    sources = batch["source"].to_pylist()
    if counts_N.sum() == len(counts_N):
        return counts_N, batch["tokens"], sources
    tokens, names = [], []
    for lead, source, others in zip(batch["tokens"].to_pylist(), sources, batch["others"].to_pylist(), strict=True):
        tokens += [lead, *(other["tokens"] for other in others or ())]
        names += [source, *(other["source"] for other in others or ())]
    return counts_N, pa.array(tokens, pa.list_(pa.int32())), names


def _of_batch(
    batch: pa.RecordBatch, captions: int, tokens: int, chars: int, sources: dict[str, int]
) -> dict[str, np.ndarray]:
    """The values of every column for some samples. captions, tokens, chars: those of the samples before. sources:
    numbers by name, to which new ones are added.
    """
    uids = batch["uid"].to_pylist()
    counts_N, lists, names = _captions(batch)
    return {
        "image_offset": batch["image_offset"].to_numpy(),
        "image_bytes": batch["image_bytes"].to_numpy(),
        "caption_end": captions + np.cumsum(counts_N),
        "source": np.array([sources.setdefault(name or "", len(sources)) for name in names], np.uint8),
        "token_end": _ends(lists, tokens),
        "token": lists.flatten().to_numpy(),
        "uid_end": _ends(batch["uid"], chars),
        "uid": np.frombuffer("".join(uids).encode(), np.uint8),
        "share_key": np.array([share_key(uid) for uid in uids], np.int64),
    }


def write_columns(samples: Path, folder: Path) -> None:
    """Write the columns of the parquet file `samples`, some rows at a time."""
    folder.mkdir()
    files: dict[str, BinaryIO] = {name: (folder / f"{name}.{kind}").open("wb") for name, kind in TYPES.items()}
    captions = tokens = chars = 0
    sources: dict[str, int] = {}
    for batch in pq.ParquetFile(samples).iter_batches(ROWS_AT_ONCE, columns=READ):
        for name, values in (columns := _of_batch(batch, captions, tokens, chars, sources)).items():
            files[name].write(values.astype(_stored(TYPES[name])).tobytes())
        captions += len(columns["source"])
        tokens += len(columns["token"])
        chars += len(columns["uid"])
    for file in files.values():
        file.close()
    write_json(folder / SOURCES, list(sources))


class Columns:
    """The mapped arrays. A copy in another process maps the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        arrays = {name: self._mapped(folder / f"{name}.{kind}", kind) for name, kind in TYPES.items()}
        self.image_offset, self.image_bytes = arrays["image_offset"], arrays["image_bytes"]
        self.share_key = arrays["share_key"]
        self._caption_end, self.source = arrays["caption_end"], arrays["source"]
        self._token_end, self._token = arrays["token_end"], arrays["token"]
        self._uid_end, self._uid = arrays["uid_end"], arrays["uid"]
        if not (folder / SOURCES).is_file():
            raise UserError(f"{folder / SOURCES} is missing; run `mdc stage shard` again")
        self.sources: list[str] = read_json(folder / SOURCES)
        ends = {"uid": "uid_end", "token": "token_end", "source": "caption_end"}
        whole = all(arrays[end][-1:].sum() == len(arrays[name]) for name, end in ends.items())
        per_sample = set(TYPES) - {*ends, "token_end"}
        if not whole or len(self._token_end) != len(self.source) or len({len(arrays[n]) for n in per_sample}) > 1:
            raise UserError(f"{folder} is damaged: its files do not fit together; run `mdc stage shard` again")

    @staticmethod
    def _mapped(path: Path, kind: str) -> np.ndarray:
        if not path.is_file():
            raise UserError(f"{path} is missing; run `mdc stage shard` again")
        if not path.stat().st_size:  # nothing cannot be mapped
            return np.empty(0, kind)
        if path.stat().st_size % np.dtype(kind).itemsize:
            raise UserError(f"{path} is cut off; run `mdc stage shard` again")
        return np.memmap(path, _stored(kind), mode="r")

    def __len__(self) -> int:
        return len(self.image_offset)

    def __reduce__(self) -> tuple[type["Columns"], tuple[Path]]:
        return Columns, (self.folder,)

    def caption_bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the captions of each row start and end; the leading one is the first."""
        return self._starts(self._caption_end, rows), self._caption_end[rows]

    def token_bounds(self, captions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of each caption start and end."""
        return self._starts(self._token_end, captions), self._token_end[captions]

    def tokens(self, places: np.ndarray) -> np.ndarray:
        """int32: the tokens at these places of the whole line."""
        return self._token[places]

    def uids(self, rows: np.ndarray) -> list[str]:
        starts, ends = self._starts(self._uid_end, rows), self._uid_end[rows]
        return [
            self._uid[start:end].tobytes().decode() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    @staticmethod
    def _starts(ends: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.where(rows > 0, ends[rows - 1], 0)
