"""Smaller sets of pairs within a set of shards: lists of samples over the same tars, nothing copied."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mdc.data.captions import SPLITS
from mdc.data.columns import FOLDER as COLUMNS
from mdc.data.columns import Columns, write_columns
from mdc.data.shards import INDEX, SAMPLES, SAMPLES_SCHEMA, read_index
from mdc.data.storage import is_url
from mdc.data.tokenizer import FILE as TOKENIZER_FILE
from mdc.data.work import place
from mdc.errors import UserError
from mdc.files import MANIFEST, fingerprint, sha256, whole_folder, write_json, write_manifest


def _location(index: dict[str, Any], shards: Path, output: Path) -> str:
    """Where the tars lie, seen from the subset's folder."""
    given = str(index["location"])
    if is_url(given) or Path(given).is_absolute():
        return given
    return os.path.relpath((shards / given).absolute(), output.absolute())


def write_subset(shards: Path, pairs: int, output: Path) -> dict[str, int]:
    """Write a folder of shards that holds `pairs` of the training pairs, and all others; returns samples per split.

    Chosen are the pairs whose uids have the smallest hashes, those that `pretrain.data_share` takes: a smaller subset
    lies within every larger one. The folder names the tars of `shards`, which must stay where they are.
    Raises UserError if there are fewer training pairs, and for an output that would replace or change `shards`.
    """
    source, target = shards.resolve(), output.resolve()
    if source.is_relative_to(target) or target.is_relative_to(source):
        raise UserError(f"{output} is {shards}, lies in it or holds it; give another folder, as data-5m/shards")
    index, columns = read_index(shards), Columns(shards / COLUMNS)
    total = sum(record["samples"] for record in index["splits"]["train"])
    if not 0 < pairs <= total:
        raise UserError(f"a subset of {pairs} pairs: {shards} has {total} training pairs; give a number up to that")
    assert SPLITS[0] == "train"
    keys = columns.share_key[:total]
    largest = np.partition(keys, pairs - 1)[pairs - 1]
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    samples, row, group = pq.ParquetFile(shards / SAMPLES), 0, 0
    with whole_folder(output) as temporary:
        with pq.ParquetWriter(temporary / SAMPLES, SAMPLES_SCHEMA) as writer:
            for split in SPLITS:
                for record in index["splits"][split]:
                    table = samples.read_row_group(group).cast(SAMPLES_SCHEMA)
                    if split == "train":
                        table = table.filter(pa.array(keys[row : row + record["samples"]] <= largest))
                    if len(table):
                        writer.write_table(table)
                        splits[split].append({**record, "samples": len(table)})
                    row, group = row + record["samples"], group + 1
        write_columns(temporary / SAMPLES, temporary / COLUMNS)
        place(shards / TOKENIZER_FILE, temporary / TOKENIZER_FILE)
        whole = index.get("subset_of", index["version"])
        version = fingerprint({"subset_of": whole, "samples": sha256(temporary / SAMPLES)})
        own = {"location": _location(index, shards, output), "subset_of": whole, "version": version, "splits": splits}
        write_json(temporary / INDEX, {**index, **own})
        counts = {split: sum(record["samples"] for record in some) for split, some in splits.items()}
        write_manifest(temporary, {"shards": sha256(shards / MANIFEST)}, counts, version=version)
    return counts
