"""Tokens for every downloaded caption, the filter by length, and the split."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mdc.config import CaptionParams
from mdc.data.download import read_metadata
from mdc.data.source import is_missing
from mdc.data.tokenizer import FILE as TOKENIZER_FILE
from mdc.data.tokenizer import CaptionTokenizer
from mdc.errors import UserError
from mdc.files import MANIFEST, read_manifest, sha256, whole_folder, write_manifest

FILE = "captions.parquet"
SPLITS = ("train", "validation", "test")
MISSING = "missing"
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("uid", "caption", "label", "group", "split")]
    + [("tokens", pa.list_(pa.int32())), ("kept", pa.bool_()), ("reason", pa.string())]
)


def split_of(group: str, validation_share: float, test_share: float) -> str:
    """The split of every row of `group`: a function of its name alone, so that new rows move no old ones."""
    place = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big") / 2**64
    if place < test_share:
        return "test"
    return "validation" if place < test_share + validation_share else "train"


def join_groups(groups: pd.Series, contents: pd.Series) -> pd.Series:
    """One name for all rows that share a group or a picture, directly or through others; a group is "" for none.

    Returns the smallest name of each set, so that neither a group nor a picture is in two splits.
    """
    names = groups.where(groups != "", "content " + contents)
    name_codes, _ = pd.factorize(names)
    content_codes, _ = pd.factorize(contents)
    size = len(names)  # nodes 0..size are groups, from there on pictures
    edges = coo_array((np.ones(size, np.int8), (name_codes, size + content_codes)), shape=(2 * size, 2 * size))
    _, sets = connected_components(edges, directed=False)
    return names.groupby(sets[name_codes]).transform("min")


def _captioned(downloaded: Path) -> pd.DataFrame:
    """uid, caption, label, group and content hash of each stored picture, and of rows dropped for want of a caption."""
    table = read_metadata(downloaded).select(["uid", "caption", "label", "group", "status", "sha256"]).to_pandas()
    rows = table[table["status"].isin(["ok", "dropped:missing_caption"])].sort_values("uid", ignore_index=True)
    return rows.fillna({"label": "", "group": "", "sha256": ""})


def _tokenizer(params: CaptionParams, training: list[str]) -> CaptionTokenizer:
    if params.tokenizer != "train":
        return CaptionTokenizer.load(params.tokenizer)
    if not training:
        raise UserError("caption.tokenizer: there are no training captions to train a tokenizer on")
    return CaptionTokenizer.train(training, params.vocab_size, params.lowercase)


def fit_length(tokens: list[int], params: CaptionParams) -> tuple[list[int], str]:
    """The tokens, cut where that is the policy, and "" or why the caption is dropped. The end token stays last."""
    if len(tokens) < params.min_tokens:
        return tokens, "too_short"
    if len(tokens) <= params.max_tokens:
        return tokens, ""
    if params.too_long == "truncate":
        return [*tokens[: params.max_tokens - 1], tokens[-1]], ""
    return tokens, "too_long"


def _check_splits(rows: pd.DataFrame, params: CaptionParams) -> None:
    reasons = {reason: count for reason, count in Counter(rows["reason"]).items() if reason}
    if not rows["kept"].any():
        raise UserError(
            f"no caption is left of {len(rows)}: {reasons}; change caption.min_tokens {params.min_tokens}, "
            f"caption.max_tokens {params.max_tokens} or caption.too_long {params.too_long!r}"
        )
    shares = {"validation": params.validation_share, "test": params.test_share}
    for split in SPLITS:
        if shares.get(split, 1) > 0 and not (rows["kept"] & (rows["split"] == split)).any():
            groups = rows.loc[rows["kept"], "group"].nunique()
            raise UserError(
                f"split {split!r} is empty: the {rows['kept'].sum()} captions kept of {len(rows)} (dropped: "
                f"{reasons or 'none'}), in {groups} groups, do not reach it with "
                f"caption.validation_share {params.validation_share} and caption.test_share {params.test_share}; "
                "change these, or give more pairs"
            )


def prepare_captions(params: CaptionParams, downloaded: Path, output: Path) -> None:
    """Write `captions.parquet` (one row per captioned or caption-less picture, sorted by uid) and `tokenizer.json`.

    Token counts include the end token. Captions dropped for their length keep their tokens, so that the lengths can be
    shown. Raises UserError if no caption, or none of a split that has a share, is left.
    """
    read_manifest(downloaded, made_by="download")
    rows = _captioned(downloaded)
    rows["group"] = join_groups(rows["group"], rows["sha256"])
    rows["split"] = [split_of(group, params.validation_share, params.test_share) for group in rows["group"]]
    missing = rows["caption"].map(is_missing)
    tokenizer = _tokenizer(params, rows.loc[~missing & (rows["split"] == "train"), "caption"].tolist())
    encoded = iter(tokenizer.encode(rows.loc[~missing, "caption"].tolist()))
    tokens, reasons, truncated = [], [], 0
    for absent in missing:
        whole = [] if absent else next(encoded)
        fitted, reason = ([], MISSING) if absent else fit_length(whole, params)
        truncated += len(fitted) < len(whole)
        tokens.append(fitted)
        reasons.append(reason)
    rows["tokens"], rows["reason"] = tokens, reasons
    rows["kept"] = rows["reason"] == ""
    _check_splits(rows, params)
    kept = rows[rows["kept"]]
    unknown = sum(ids.count(tokenizer.vocabulary.unk_id) for ids in kept["tokens"])
    with whole_folder(output) as temporary:
        table = pa.Table.from_pandas(rows[SCHEMA.names], SCHEMA, preserve_index=False).replace_schema_metadata(None)
        pq.write_table(table, temporary / FILE)
        tokenizer.save(temporary / TOKENIZER_FILE)
        counts = {
            "rows": len(rows),
            "kept": len(kept),
            "splits": {split: int((kept["split"] == split).sum()) for split in SPLITS},
            "groups": int(kept["group"].nunique()),
            "reasons": dict(sorted(Counter(reason or "kept" for reason in reasons).items())),
            "truncated": truncated,
            "escaped": sum(tokenizer.spells_special(caption) for caption in rows.loc[~missing, "caption"]),
            "vocabulary": tokenizer.vocabulary.size,
            "tokens": int(kept["tokens"].map(len).sum()),
            "unknown_tokens": unknown,
        }
        inputs = {"downloaded": sha256(downloaded / MANIFEST), "params": params.model_dump(mode="json")}
        write_manifest(temporary, inputs, counts)
