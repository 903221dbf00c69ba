"""What a run left on disk, read once for the report: counts by column, and in full only the samples that it shows."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import safe_open

from mdc.config import ModelConfig, Params
from mdc.data.stats import Stats, read_stats
from mdc.data.tokenizer import CaptionTokenizer
from mdc.files import read_json
from mdc.report.pictures import Pictures

SPLITS = ("train", "validation", "test")
WEIGHTS = "model.safetensors"
# files of the evaluation: the field that they become, and the list in them that is empty where the part was not made
PARTS = {
    "probe": ("probe", "rows"),
    "compositional": ("compositional", "rules"),
    "captions": ("written", "examples"),
    "neighbours": ("neighbours", "examples"),
}


@dataclass(frozen=True)
class Run:
    """The stages' outputs. A part that the run could not make is None: no classes, no pairs, nothing to generate."""

    params: Params
    statuses: dict[str, int]  # rows of the list by what became of them
    dropped: dict[str, int]  # captions that were left out, by reason
    kept_lengths: NDArray[np.int64]  # tokens
    dropped_lengths: NDArray[np.int64]  # of those that there were
    splits: dict[str, int]  # samples
    first_pairs: list[str]  # uids of the training split's first samples
    version: str  # of the data
    tokenizer: CaptionTokenizer
    config: ModelConfig
    losses: pd.DataFrame
    parameters: dict[str, int]  # of the model, by part
    features: tuple[int, int]  # rows and width
    metrics: dict[str, Any]
    probe: dict[str, Any] | None
    compositional: dict[str, Any] | None
    written: dict[str, Any] | None
    neighbours: dict[str, Any] | None
    stats: Stats  # of the list and its pictures
    notes: dict[str, str]  # by part: why it is None
    pictures: Pictures


def read_run(
    params: Params, downloaded: Path, captions: Path, shards: Path, model: Path, features: Path, evaluation: Path
) -> Run:
    """Read what the report shows. The stages have finished."""
    index = read_json(shards / "index.json")
    splits = pq.read_table(shards / "samples.parquet", columns=["uid", "split"])
    train = splits.filter(pc.equal(splits["split"], "train"))
    first_pairs = train["uid"].slice(0, params.report.sample_pairs).to_pylist()
    lengths, kept, reasons = _read_captions(captions)
    found = {name: read_json(evaluation / f"{name}.json") for name in PARTS}
    parts = {field: found[name] if found[name][essential] else None for name, (field, essential) in PARTS.items()}
    return Run(
        params=params,
        statuses=_counts(pq.read_table(sorted(downloaded.glob("*.parquet")), columns=["status"])["status"]),
        dropped=reasons,
        kept_lengths=lengths[kept],
        dropped_lengths=lengths[~kept & (lengths > 0)],
        splits={split: _counts(splits["split"]).get(split, 0) for split in SPLITS},
        first_pairs=first_pairs,
        version=index["version"],
        tokenizer=CaptionTokenizer.load(shards / "tokenizer.json"),
        config=ModelConfig.model_validate_json((model / "config.json").read_bytes()),
        losses=pd.read_csv(model / "loss.csv"),
        parameters=count_parameters(model / WEIGHTS),
        features=np.load(features / "model.npy", mmap_mode="r").shape,
        metrics=read_json(evaluation / "metrics.json"),
        pictures=Pictures.read(shards, {*first_pairs, *_uids(parts)}, index["image_format"]),
        stats=read_stats(downloaded, captions, shards),
        notes={field: found[name].get("note", "") for name, (field, _) in PARTS.items()},
        **parts,
    )


def _uids(value: Any) -> Iterator[str]:
    """Every uid in a tree of lists and mappings."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from [item] if key == "uid" else _uids(item)
    elif isinstance(value, list):
        for item in value:
            yield from _uids(item)


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """How often each value occurs, the most frequent first, equals by name."""
    pairs = [(item["values"].as_py(), item["counts"].as_py()) for item in pc.value_counts(column)]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _read_captions(captions: Path) -> tuple[NDArray[np.int64], NDArray[np.bool_], dict[str, int]]:
    """Lengths in tokens, which captions were kept, and the reasons of the others."""
    table = pq.read_table(sorted(captions.glob("*.parquet")), columns=["kept", "reason", "tokens"])
    lengths = pc.fill_null(pc.list_value_length(table["tokens"]), 0).to_numpy().astype(np.int64)
    kept = table["kept"].to_numpy().astype(bool)
    return lengths, kept, _counts(table.filter(pc.invert(table["kept"]))["reason"])


def count_parameters(weights: Path) -> dict[str, int]:
    """Numbers in a safetensors file by the first part of their names, read from its header alone."""
    counts: dict[str, int] = {}
    with safe_open(weights, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            part = name.partition(".")[0]
            counts[part] = counts.get(part, 0) + prod(file.get_slice(name).get_shape())
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "encoder", item[0])))  # the encoder is the point
