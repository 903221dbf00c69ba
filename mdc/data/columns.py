"""What training reads of each sample, as plain arrays on disk that all processes of a host share.

One file per column, `NAME.TYPE`, little-endian and without a header, rows in the order of the shards. They are mapped
and not read: opening takes milliseconds for any number of samples, and only the pages that a batch touches come into
memory, once per host.

N: samples, T: tokens of all samples, U: bytes of all uids.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mdc.draws import derive_seed
from mdc.errors import UserError

FOLDER = "columns"
ROWS_AT_ONCE = 2**16
SOURCES = ["uid", "image_offset", "image_bytes", "tokens"]  # columns of the list of samples
TYPES = {
    "image_offset": "int64",  # [N] bytes from the start of the shard
    "image_bytes": "int32",  # [N]
    "token_end": "int64",  # [N] tokens of this sample and of all before it
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


def _of_batch(batch: pa.RecordBatch, tokens: int, chars: int) -> dict[str, np.ndarray]:
    """The values of every column for some samples. tokens, chars: those of the samples before."""
    uids = batch["uid"].to_pylist()
    return {
        "image_offset": batch["image_offset"].to_numpy(),
        "image_bytes": batch["image_bytes"].to_numpy(),
        "token_end": _ends(batch["tokens"], tokens),
        "token": batch["tokens"].flatten().to_numpy(),
        "uid_end": _ends(batch["uid"], chars),
        "uid": np.frombuffer("".join(uids).encode(), np.uint8),
        "share_key": np.array([share_key(uid) for uid in uids], np.int64),
    }


def write_columns(samples: Path, folder: Path) -> None:
    """Write the columns of the parquet file `samples`, some rows at a time."""
    folder.mkdir()
    files: dict[str, BinaryIO] = {name: (folder / f"{name}.{kind}").open("wb") for name, kind in TYPES.items()}
    tokens = chars = 0
    for batch in pq.ParquetFile(samples).iter_batches(ROWS_AT_ONCE, columns=SOURCES):
        for name, values in (columns := _of_batch(batch, tokens, chars)).items():
            files[name].write(values.astype(_stored(TYPES[name])).tobytes())
        tokens += len(columns["token"])
        chars += len(columns["uid"])
    for file in files.values():
        file.close()


class Columns:
    """The mapped arrays. A copy in another process maps the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        arrays = {name: self._mapped(folder / f"{name}.{kind}", kind) for name, kind in TYPES.items()}
        self.image_offset, self.image_bytes = arrays["image_offset"], arrays["image_bytes"]
        self.share_key = arrays["share_key"]
        self._token_end, self._token = arrays["token_end"], arrays["token"]
        self._uid_end, self._uid = arrays["uid_end"], arrays["uid"]
        whole = self._token_end[-1:].sum() == len(self._token) and self._uid_end[-1:].sum() == len(self._uid)
        if not whole or len({len(arrays[name]) for name in set(TYPES) - {"token", "uid"}}) > 1:
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

    def token_bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of each row start and end."""
        return self._starts(self._token_end, rows), self._token_end[rows]

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
