"""Reading lists of URLs and captions: every file's columns are checked first, and every record is accounted for."""

import csv
import difflib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mdc.config import DownloadParams
from mdc.data.tars import MAX_NAME_BYTES
from mdc.errors import UserError

SUFFIXES = (".parquet", ".csv", ".tsv")
LIST_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("uid", "url", "caption", "label", "group", "status", "detail")]
)
LONGEST_UID = MAX_NAME_BYTES - len(".json") - 5
csv.field_size_limit(2**27)  # characters; the default refuses long captions


def is_missing(caption: str | None) -> bool:
    """Null, empty, or nothing but white space. The words "NA", "null" and "None" are captions like any other."""
    return caption is None or not caption.strip()


def list_files(place: Path) -> list[Path]:
    """The list itself, or the lists in a folder by name. Raises UserError if there are none."""
    if not place.exists():
        raise UserError(
            f"download.input: {place} does not exist; give a file or folder of {', '.join(SUFFIXES)}, or "
            "run `mdc sample` to make the sample's"
        )
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    if place.is_dir():
        files = [file for file in files if file.suffix in SUFFIXES and not file.name.startswith(".")]
    if not files or files[0].suffix not in SUFFIXES:
        raise UserError(f"download.input: {place} holds no list of a known kind; give {', '.join(SUFFIXES)}")
    return files


def check_places(place: Path, *written: Path) -> None:
    """Refuse to write where the lists are read: a second run would read what the first one wrote.

    Symbolic links are followed first. A single file may have its outputs beside it; a folder of lists may not have
    them inside.
    """
    source = place.resolve()
    for target in written:
        folder = target.resolve()
        if source.is_relative_to(folder) or (source.is_dir() and folder.is_relative_to(source)):
            raise UserError(
                f"{target} would be written where the list {place} is read"
                + (f" (it is {folder})" if folder != target.absolute() else "")
                + "; set paths.data and paths.runs, or download.input, to a folder outside the other"
            )


def _wanted_columns(params: DownloadParams) -> dict[str, str]:
    """Column in the files by our own name for it; the parameter is `download.<name>_column`."""
    names = {
        "url": params.url_column,
        "caption": params.caption_column,
        "uid": params.uid_column,
        "label": params.label_column,
        "group": params.group_column,
    }
    return {ours: theirs for ours, theirs in names.items() if theirs}


def _dialect(file: Path) -> dict[str, Any]:
    """csv: quotes are balanced and doubled within. tsv: quotes are ordinary characters."""
    if file.suffix == ".tsv":
        return {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    return {"delimiter": ",", "strict": True}


def _text_records(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of each record, the header first; blank lines are no records."""
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, **_dialect(file))
        start = 1
        try:
            for record in reader:
                if record:
                    yield start, record
                start = reader.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"{file} line {start}: {error}; a quote opens here that is not closed before the next comma. Double "
                "the quotes within a field, or save the list as .tsv, where quotes are ordinary characters"
            ) from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 at or after line {start}: {error.reason}; convert it") from None


def _columns(file: Path) -> list[str]:
    if file.suffix == ".parquet":
        try:
            return list(pq.read_schema(file).names)
        except pa.ArrowInvalid as error:
            raise UserError(f"{file} is not a parquet file: {error}") from None
    return next(_text_records(file), (1, []))[1]


def check_columns(files: list[Path], params: DownloadParams) -> None:
    """Raise UserError that names each file, the column it lacks, those it has and the close match."""
    problems = []
    for file in files:
        columns = _columns(file)
        for ours, theirs in _wanted_columns(params).items():
            count = columns.count(theirs)
            if count == 1:
                continue
            if count > 1:
                problems.append(f"{file} has {count} columns named {theirs!r} (download.{ours}_column); rename one")
                continue
            folded = {column.casefold(): column for column in columns}
            close = difflib.get_close_matches(theirs.casefold(), list(folded), n=1)
            hint = f"; did you mean {folded[close[0]]!r}?" if close else ""
            has = ", ".join(columns) or "no columns"
            problems.append(f"{file} has no column {theirs!r} (download.{ours}_column); it has {has}{hint}")
    if problems:
        raise UserError("\n".join(problems))


def _texts(file: Path, values: pa.Array, column: str) -> list[str | None]:
    try:
        return values.cast(pa.string()).to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{file}: column {column!r} of type {values.type} is no text: {error}") from None


def _parquet_rows(file: Path, wanted: dict[str, str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    number = 0
    with pq.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(columns=list(dict.fromkeys(wanted.values()))):
            columns = {ours: _texts(file, batch.column(theirs), theirs) for ours, theirs in wanted.items()}
            for index in range(batch.num_rows):
                number += 1
                yield f"{file.name} row {number}", {ours: values[index] for ours, values in columns.items()}


def _text_rows(file: Path, wanted: dict[str, str]) -> Iterator[tuple[str, dict[str, str | None] | None]]:
    records = _text_records(file)
    _, header = next(records)
    positions = {ours: header.index(theirs) for ours, theirs in wanted.items()}
    for line, record in records:
        fits = len(record) == len(header)
        yield f"{file.name} line {line}", {ours: record[at] for ours, at in positions.items()} if fits else None


def _rows(file: Path, wanted: dict[str, str]) -> Iterator[tuple[str, dict[str, str | None] | None]]:
    """Place and values of each record; None for values where the number of fields is wrong."""
    return _parquet_rows(file, wanted) if file.suffix == ".parquet" else _text_rows(file, wanted)


def _check_uid(uid: str, place: str) -> None:
    """A uid names tar members, whose extension starts at the first dot."""
    if not uid or not uid.isprintable() or any(c.isspace() or c in "./\\" for c in uid):
        problem = "is empty" if not uid else "holds a dot, slash, space or unprintable character"
    elif len(uid.encode()) > LONGEST_UID:
        problem = f"is longer than {LONGEST_UID} bytes"
    else:
        return
    raise UserError(
        f"{place}: uid {uid!r} {problem}, so it cannot name a file in a tar; change it, or set download.uid_column to "
        '"" to have uids made from URL and caption'
    )


def hash_uid(*parts: str) -> str:
    """96 bits in hexadecimal, the same wherever the row stands in the list."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _joined_lines(caption: str | None, params: DownloadParams) -> str | None:
    return " ".join(caption.split()) if caption and params.line_breaks == "space" else caption


def _problem(url: str, caption: str | None) -> str:
    """Why a row is dropped before any request, or ""."""
    if not url.strip():
        return "dropped:no_url"
    if is_missing(caption):
        return "dropped:missing_caption"
    if caption and any(c in caption for c in "\t\n\r"):
        return "dropped:line_break"
    return ""


def read_list(params: DownloadParams) -> pa.Table:
    """Every record of the list in its order, as LIST_SCHEMA.

    status is null for rows to be fetched, else `dropped:` with no_url, missing_caption, line_break (a tab or line
    break in the caption), malformed (wrong number of fields) or duplicate (the same URL and caption as an earlier
    row). Label and group are "" where the list gives none.
    Raises UserError before any request for a missing file or column, an empty list, and uids that are repeated or
    cannot name a file.
    """
    files = list_files(Path(params.input))
    check_columns(files, params)
    wanted = _wanted_columns(params)
    columns: dict[str, list[str | None]] = {name: [] for name in LIST_SCHEMA.names}
    seen: dict[str, str] = {}
    for file in files:
        for place, row in _rows(file, wanted):
            if row is None:
                values: dict[str, str | None] = {"uid": hash_uid(place), "status": "dropped:malformed", "detail": place}
            else:
                url, caption = row["url"] or "", _joined_lines(row["caption"], params)
                uid = (row["uid"] or "") if "uid" in wanted else hash_uid(url, caption or "")
                status = _problem(url, caption)
                if "uid" in wanted:
                    _check_uid(uid, place)
                    if uid in seen:
                        raise UserError(f"uid {uid!r} is given twice, at {seen[uid]} and at {place}; make uids unique")
                elif uid in seen and not status:
                    status = "dropped:duplicate"
                if not status or "uid" in wanted:
                    seen[uid] = place
                values = {
                    "uid": uid,
                    "url": url.strip() or None,
                    "caption": None if is_missing(caption) else caption,
                    "label": row.get("label") or "",
                    "group": row.get("group") or "",
                    "status": status or None,
                    "detail": place if status else None,
                }
            for name, column in columns.items():
                column.append(values.get(name))
    table = pa.table(columns, schema=LIST_SCHEMA)
    if not table.num_rows:
        raise UserError(f"download.input: {params.input} has no rows; there is nothing to download")
    return table
