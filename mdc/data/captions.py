"""Tokens for every downloaded caption, what is left out and why, and the split."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mdc.config import CaptionParams, ComputeParams
from mdc.data import text
from mdc.data.alike import DECISION_SCHEMA, WORDS, decide, evaluation_files, hashes_in
from mdc.data.parallel import ONE_WORKER, for_each
from mdc.data.tables import DUPLICATES, database, one_row, parquet
from mdc.data.text import MISSING
from mdc.data.tokenizer import FILE as TOKENIZER_FILE
from mdc.data.tokenizer import CaptionTokenizer
from mdc.data.work import claimed, place, work_beside
from mdc.draws import derive_seed
from mdc.errors import UserError
from mdc.files import MANIFEST, read_json, read_manifest, sha256, whole_file, whole_folder, write_json, write_manifest

SPLITS = ("train", "validation", "test")
USUAL_SOURCE = "caption"  # of a list with one column of captions
CAPTIONED = ("ok", "dropped:missing_caption")  # statuses of the rows that this stage counts
ENCODED_AT_ONCE = 4096  # captions
OTHER = pa.struct([("source", pa.string()), ("caption", pa.string()), ("tokens", pa.list_(pa.int32()))])
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("uid", "caption", "source", "label", "group", "split")]
    + [("tokens", pa.list_(pa.int32())), ("others", pa.list_(OTHER)), ("kept", pa.bool_()), ("reason", pa.string())]
)
CLEAN = pa.struct([(name, pa.string()) for name in ("source", "text", "reason")])
CLEAN_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("part", "uid", "url", "label", "group", "sha256")]
    + [(name, pa.uint64()) for name in WORDS]
    + [("usable", pa.bool_()), ("captions", pa.list_(CLEAN))]
)


def split_of(group: str, validation_share: float, test_share: float) -> str:
    """The split of every row of `group`: a function of its name alone, so that new rows move no old ones."""
    place = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big") / 2**64
    if place < test_share:
        return "test"
    return "validation" if place < test_share + validation_share else "train"


def fit_length(tokens: list[int], params: CaptionParams) -> tuple[list[int], str]:
    """The tokens, cut where that is the policy, and "" or why the caption is dropped. The end token stays last."""
    if len(tokens) < params.min_tokens:
        return tokens, "too_short"
    if len(tokens) <= params.max_tokens:
        return tokens, ""
    if params.too_long == "truncate":
        return [*tokens[: params.max_tokens - 1], tokens[-1]], ""
    return tokens, "too_long"


# First: texts as they are to be written, and the pictures' hashes, file by file


def _captioned(part: Path) -> pa.Table:
    """uid, url, label, group, sha256 and captions of the rows that are to have one, sorted by uid."""
    columns = ["uid", "url", "label", "group", "sha256", "caption", "status"]
    several = "captions" in pq.read_schema(part).names
    table = pq.read_table(part, columns=columns + ["captions"] * several)
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UserError(f"{part} is damaged: {error}; run `mdc stage download` again") from None
    table = table.filter(pc.is_in(table["status"], pa.array(CAPTIONED))).sort_by("uid").combine_chunks()
    for name in ("label", "group", "sha256"):
        table = table.set_column(table.schema.get_field_index(name), name, pc.fill_null(table[name], ""))
    return table


def _flat(table: pa.Table) -> tuple[pa.StringArray, pa.StringArray, np.ndarray]:
    """All captions of the rows one after the other: their texts, their sources, and where each row's end."""
    first = pc.fill_null(table["caption"], "").combine_chunks()
    if "captions" not in table.column_names or table["captions"].null_count == len(table):
        return first, pa.array([USUAL_SOURCE] * len(table), pa.string()), np.arange(1, len(table) + 1)
    lists = [
        given or [{"source": USUAL_SOURCE, "text": caption}]
        for given, caption in zip(table["captions"].to_pylist(), first.to_pylist(), strict=True)
    ]
    pairs = list(chain.from_iterable(lists))
    texts = pa.array([pair["text"] for pair in pairs], pa.string())
    sources = pa.array([pair["source"] for pair in pairs], pa.string())
    return texts, sources, np.cumsum([len(given) for given in lists])


def clean_rows(table: pa.Table, params: CaptionParams) -> pa.Table:
    """Columns usable and captions (source, text, reason) of rows with columns caption and captions."""
    texts, sources, ends = _flat(table)
    texts = text.clean(texts, params)
    reasons = pa.array(text.reasons(texts, params), pa.string())
    flat = pa.StructArray.from_arrays([sources, pc.fill_null(texts, ""), reasons], fields=list(CLEAN))
    usable = np.add.reduceat(pc.equal(reasons, "").to_numpy(zero_copy_only=False).astype(int), [0, *ends[:-1]]) > 0
    return pa.table({"usable": usable, "captions": _lists(np.diff(ends, prepend=0), flat)})


def _clean_part(part: Path, output: Path, params: CaptionParams) -> None:
    if output.is_file():
        return
    table = _captioned(part)
    tar = part.with_suffix(".tar")
    hashes = hashes_in(tar) if params.alike_bits >= 0 and tar.is_file() else {}
    words = [hashes.get(uid, [None] * len(WORDS)) for uid in table["uid"].to_pylist()]
    columns = {name: table[name] for name in ("uid", "url", "label", "group", "sha256")}
    columns |= {name: pa.array([row[at] for row in words], pa.uint64()) for at, name in enumerate(WORDS)}
    columns["part"] = pa.array([part.stem] * len(table), pa.string())
    cleaned = clean_rows(table, params) if len(table) else CLEAN_SCHEMA.empty_table()
    columns |= {name: cleaned[name] for name in ("usable", "captions")}
    with whole_file(output) as temporary:
        pq.write_table(pa.table({name: columns[name] for name in CLEAN_SCHEMA.names}).cast(CLEAN_SCHEMA), temporary)


# Then: groups and pictures over the whole list (see `alike`), and the tokenizer


def _decided(decisions: Path, name: str) -> pa.Table:
    """Sorted by uid, as the rows of the part are."""
    path = decisions / name
    return pq.read_table(path) if path.is_file() else DECISION_SCHEMA.empty_table()


class _TrainingCaptions:
    """Captions of the training split, all or those of the uids with the smallest hashes; read anew each time."""

    def __init__(self, cleaned: Path, decisions: Path, params: CaptionParams) -> None:
        self._cleaned, self._decisions = cleaned, decisions
        self._shares = (params.validation_share, params.test_share)
        with database(decisions.parent / "scratch") as db:
            (captions,) = one_row(db, f"SELECT coalesce(sum(len(captions)), 0) FROM {parquet(cleaned)}")
        self._share = params.tokenizer_captions / max(1, int(captions))

    def __iter__(self) -> Iterator[str]:
        for part in sorted(self._cleaned.glob("*.parquet")):
            rows = pq.read_table(part, columns=["captions"]).to_pylist()
            for row, decision in zip(rows, _decided(self._decisions, part.name).to_pylist(), strict=True):
                if not decision["reason"] and self._holds(decision["uid"], decision["group"]):
                    yield from (caption["text"] for caption in row["captions"] if not caption["reason"])

    def _holds(self, uid: str, group: str) -> bool:
        if split_of(group, *self._shares) != "train":
            return False
        return self._share >= 1 or derive_seed("tokenizer", uid) < self._share * 2**63


def _tokenizer(params: CaptionParams, cleaned: Path, decisions: Path) -> CaptionTokenizer:
    if params.tokenizer != "train":
        return CaptionTokenizer.load(params.tokenizer)
    captions = _TrainingCaptions(cleaned, decisions, params)
    if next(iter(captions), None) is None:
        raise UserError("caption.tokenizer: there are no training captions to train a tokenizer on")
    return CaptionTokenizer.train(captions, params.vocab_size, params.lowercase)


# Last: tokens, the filter by length and the split, file by file


class _Part:
    """The captions of one file, all after one another, and what becomes of each. N: rows, C: captions."""

    def __init__(self, rows: pa.Table, decisions: pa.Table, params: CaptionParams) -> None:
        assert rows["uid"].equals(decisions["uid"]), "rows and decisions are not of the same part"
        captions = rows["captions"].combine_chunks()
        self.rows = rows
        self.starts_N = captions.offsets.to_numpy()[:-1]
        self.row_C = np.repeat(np.arange(len(rows)), pc.list_value_length(captions).to_numpy())
        self.sources, self.texts, reasons = (captions.flatten().field(name) for name in CLEAN.names)
        self.reasons_C = reasons.to_numpy(zero_copy_only=False).astype(object)
        decided_C = decisions["reason"].to_numpy().astype(object)[self.row_C]
        self.reasons_C = np.where((decided_C != "") & (self.reasons_C != MISSING), decided_C, self.reasons_C)
        self.groups = decisions["group"]
        shares = (params.validation_share, params.test_share)
        self.splits = [split_of(group, *shares) for group in self.groups.to_pylist()]
        self.tokens = pa.array([[]] * len(self.texts), pa.list_(pa.int32()))

    def encode(self, tokenizer: CaptionTokenizer, params: CaptionParams) -> Counter[str]:
        """Tokens of what is left, cut or dropped for their length. Counts what was cut and escaped."""
        left = np.flatnonzero(self.reasons_C == "")
        texts = self.texts.take(pa.array(left))
        counts: Counter[str] = Counter(escaped=tokenizer.count_special(texts), truncated=0)
        lengths_C, ids = np.zeros(len(self.texts), np.int32), [np.empty(0, np.int32)]
        for start in range(0, len(left), ENCODED_AT_ONCE):
            some = tokenizer.encode(texts.slice(start, ENCODED_AT_ONCE).to_pylist())
            for at, whole in enumerate(some):
                if not params.min_tokens <= len(whole) <= params.max_tokens:
                    some[at], self.reasons_C[left[start + at]] = fit_length(whole, params)
                    counts["truncated"] += len(some[at]) < len(whole)
            lengths_C[left[start : start + ENCODED_AT_ONCE]] = [len(tokens) for tokens in some]
            ids.append(np.fromiter(chain.from_iterable(some), np.int32))
        self.tokens = _lists(lengths_C, pa.array(np.concatenate(ids)))
        return counts

    def table(self) -> pa.Table:
        """As SCHEMA: the first caption that stays leads, the others that stay follow it."""
        kept_C = self.reasons_C == ""
        places_C = np.arange(len(kept_C))
        leads_N = np.minimum.reduceat(np.where(kept_C, places_C, len(kept_C)), self.starts_N)
        leads_N = np.where(leads_N < len(kept_C), leads_N, self.starts_N)
        other_C = kept_C & (places_C != leads_N[self.row_C])
        fields = [self.sources, self.texts, self.tokens]
        others = pa.StructArray.from_arrays(fields, fields=list(OTHER)).filter(pa.array(other_C))
        leads = pa.array(leads_N)
        columns = {
            "uid": self.rows["uid"],
            "caption": self.texts.take(leads),
            "source": self.sources.take(leads),
            "label": self.rows["label"],
            "group": self.groups,
            "split": self.splits,
            "tokens": self.tokens.take(leads),
            "others": _lists(np.add.reduceat(other_C, self.starts_N, dtype=np.int32), others),
            "kept": kept_C[leads_N],
            "reason": self.reasons_C[leads_N],
        }
        return pa.table(columns, schema=SCHEMA)


def _lists(lengths: np.ndarray, values: pa.Array) -> pa.ListArray:
    """Lists of these lengths, one after the other."""
    return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), values)


def _counts(part: _Part, table: pa.Table, tokenizer: CaptionTokenizer) -> Counter[str]:
    kept = table.filter(table["kept"])
    ids = pc.list_flatten(kept["tokens"])
    counts: Counter[str] = Counter(rows=len(table), kept=len(kept), tokens=len(ids))
    counts["unknown_tokens"] = int(pc.sum(pc.equal(ids, tokenizer.vocabulary.unk_id)).as_py() or 0)
    counts.update({f"split {split}": n for split, n in Counter(kept["split"].to_pylist()).items()})
    counts.update({f"reason {reason or 'kept'}": n for reason, n in Counter(table["reason"].to_pylist()).items()})
    counts.update({f"caption {reason or 'kept'}": n for reason, n in Counter(part.reasons_C.tolist()).items()})
    return counts


def finish_rows(
    rows: pa.Table, decisions: pa.Table, tokenizer: CaptionTokenizer, params: CaptionParams
) -> tuple[pa.Table, Counter[str]]:
    """Rows as SCHEMA, and counts of what became of them. rows: uid, label and captions, see `clean_rows`."""
    if not len(rows):
        return SCHEMA.empty_table(), Counter()
    part = _Part(rows, decisions, params)
    counts = part.encode(tokenizer, params)
    table = part.table()
    counts.update(_counts(part, table, tokenizer))
    return table, counts


def _finish_part(cleaned: Path, decisions: Path, tokenizer: Path, output: Path, params: CaptionParams) -> Counter[str]:
    record = output.with_suffix(".json")
    if not (output.is_file() and record.is_file()):
        encoder, rows = CaptionTokenizer.load(tokenizer), pq.read_table(cleaned)
        table, counts = finish_rows(rows, _decided(decisions, cleaned.name), encoder, params)
        with whole_file(output) as temporary:
            pq.write_table(table, temporary)
        write_json(record, counts)
    return Counter(read_json(record))


# All of it


def _named(counts: Counter[str], kind: str) -> dict[str, int]:
    return {name.removeprefix(kind): counts[name] for name in sorted(counts) if name.startswith(kind)}


def _check_splits(counts: Counter[str], groups: int, params: CaptionParams) -> None:
    reasons = {name: count for name, count in _named(counts, "reason ").items() if name != "kept"}
    if not counts["kept"]:
        raise UserError(
            f"no caption is left of {counts['rows']}: {reasons}; change caption.min_tokens {params.min_tokens}, "
            f"caption.max_tokens {params.max_tokens} or caption.too_long {params.too_long!r}, or a filter of captions"
        )
    shares = {"validation": params.validation_share, "test": params.test_share}
    for split in SPLITS:
        if shares.get(split, 1) > 0 and not counts[f"split {split}"]:
            raise UserError(
                f"split {split!r} is empty: the {counts['kept']} captions kept of {counts['rows']} (dropped: "
                f"{reasons or 'none'}), in {groups} groups, do not reach it with "
                f"caption.validation_share {params.validation_share} and caption.test_share {params.test_share}; "
                "change these, or give more pairs"
            )


def _identity(params: CaptionParams, downloaded: Path) -> dict[str, Any]:
    """All that the result depends on, so that unfinished work on anything else is not taken up."""
    files = [Path(params.blocklist)] if params.blocklist else []
    files += evaluation_files(Path(params.exclude)) if params.exclude else []
    return {
        "downloaded": sha256(downloaded / MANIFEST),
        "params": params.model_dump(mode="json"),
        "files": {str(file): sha256(file) for file in files if file.is_file()},
    }


def _count_groups(finished: Path, scratch: Path) -> int:
    with database(scratch) as db:
        return int(one_row(db, f'SELECT count(DISTINCT "group") FROM {parquet(finished)} WHERE kept')[0])


def _prepare(params: CaptionParams, downloaded: Path, work: Path, compute: ComputeParams) -> tuple[Counter[str], int]:
    """Fill `work/finished`, `work/decisions` and `work/tokenizer.json`; counts, and the number of groups."""
    parts = sorted(downloaded.glob("*.parquet"))
    cleaned, decisions, finished, tokenizer = (work / n for n in ("cleaned", "decisions", "finished", TOKENIZER_FILE))
    for _ in for_each(_clean_part, ((part, cleaned / part.name, params) for part in parts), compute):
        pass
    if not decisions.is_dir():
        decide(params, cleaned, work / "scratch", decisions)
    if not tokenizer.is_file():
        _tokenizer(params, cleaned, decisions).save(tokenizer)
    jobs = ((cleaned / part.name, decisions, tokenizer, finished / part.name, params) for part in parts)
    counts: Counter[str] = Counter()
    for some in for_each(_finish_part, jobs, compute):
        counts.update(some)
    groups = _count_groups(finished, work / "scratch")
    _check_splits(counts, groups, params)
    return counts, groups


def prepare_captions(
    params: CaptionParams,
    downloaded: Path,
    output: Path,
    work: Path | None = None,
    compute: ComputeParams = ONE_WORKER,
) -> None:
    """Write one parquet file of SCHEMA per part of the download (a row per captioned or caption-less picture, sorted
    by uid), `tokenizer.json` and `duplicates.json`.

    Token counts include the end token. Captions dropped for their length keep their tokens, so that the lengths can be
    shown. Equal inputs give equal bytes for any number of workers.
    work: keeps finished files through a kill; None = a folder beside the output.
    Raises UserError if no caption, or none of a split that has a share, is left.
    """
    read_manifest(downloaded, made_by="download")
    text.check(params)
    work = work or work_beside(output)
    with claimed(work, _identity(params, downloaded)):
        counts, groups = _prepare(params, downloaded, work, compute)
        tokenizer = CaptionTokenizer.load(work / TOKENIZER_FILE)
        with whole_folder(output) as temporary:
            for file in sorted((work / "finished").glob("*.parquet")):
                place(file, temporary / file.name)
            for file in (work / TOKENIZER_FILE, work / "decisions" / DUPLICATES):
                place(file, temporary / file.name)
            summary = {
                **{name: counts[name] for name in ("rows", "kept", "truncated", "escaped", "tokens", "unknown_tokens")},
                "splits": {split: counts[f"split {split}"] for split in SPLITS},
                "groups": groups,
                "reasons": _named(counts, "reason "),
                "captions": _named(counts, "caption "),
                "vocabulary": tokenizer.vocabulary.size,
            }
            inputs = {"downloaded": sha256(downloaded / MANIFEST), "params": params.model_dump(mode="json")}
            write_manifest(temporary, inputs, summary)
