"""Reading lists of URLs and captions: every file's columns are checked first, and every record is accounted for.

A list is one file or many, here or at any address that fsspec reads. Records come one after another, so that memory
does not grow with the list; only COCO's JSON is read whole.
"""

import csv
import difflib
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from mdc.config import DownloadParams
from mdc.data.tars import MAX_NAME_BYTES
from mdc.errors import UserError

KINDS = ("parquet", "csv", "tsv", "jsonl", "txt", "json")
IN_FOLDERS = KINDS[:4]  # what a folder is read for; other .txt and .json files lie beside lists
COMPRESSED = ".gz"
LONGEST_UID = MAX_NAME_BYTES - len(".json") - 5
FOOTERS_AT_ONCE = 16  # files whose columns are read at a time; each is a wait where the list is far away
csv.field_size_limit(2**27)  # characters; the default refuses long captions


class Record(NamedTuple):
    """One record of a list. Dropped ones say why; `url` and `captions` are then what was found."""

    place: str  # file and line, for people
    uid: str
    url: str
    captions: list[tuple[str, str]]  # source and text
    label: str = ""
    group: str = ""
    dropped: str = ""  # "" or the reason
    left_out: int = 0  # captions that are not in `captions`, for their line breaks


@dataclass(frozen=True)
class ListFile:
    """A file of any file system."""

    fs: fsspec.AbstractFileSystem
    path: str  # as the file system knows it
    kind: str

    def __str__(self) -> str:
        return self.path if isinstance(self.fs, LocalFileSystem) else self.fs.unstrip_protocol(self.path)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def is_missing(caption: str | None) -> bool:
    """Null, empty, or nothing but white space. The words "NA", "null" and "None" are captions like any other."""
    return caption is None or not caption.strip()


def open_place(place: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of an address, and the path in it. Raises UserError where its package is missing."""
    try:
        return fsspec.core.url_to_fs(place)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"download.input: {place} cannot be opened: {error}; `pip install 'mdc[s3]'` brings s3://, `gcsfs` gs://"
        ) from None


def is_local(place: str) -> bool:
    return isinstance(open_place(place)[0], LocalFileSystem)


@contextmanager
def answering(place: str) -> Iterator[None]:
    """Raise UserError where the file system of an address does not let it be read; each raises errors of its own."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_local(place) and not isinstance(error, OSError):
            raise
        raise UserError(
            f"download.input: {place} cannot be read: {type(error).__name__}: {error}; mend the address, the access to "
            "it or the network, and run again"
        ) from error


def root_of(place: str) -> str:
    """The folder that a file, a folder or a pattern lies in; of a folder, itself."""
    fs, path = open_place(place)
    if has_pattern(path):
        fixed = path[: min(path.index(c) for c in "*?[" if c in path)]
        return fixed.rpartition("/")[0] or "/"
    return path if fs.isdir(path) else path.rpartition("/")[0]


def root_address(place: str) -> str:
    """As `root_of`, with the protocol, for another process to open."""
    return open_place(place)[0].unstrip_protocol(root_of(place))


def has_pattern(path: str) -> bool:
    return any(c in path for c in "*?[")


def _kind(path: str) -> str:
    kind = PurePosixPath(path.removesuffix(COMPRESSED)).suffix.removeprefix(".")
    return kind if kind in KINDS and not (kind == "parquet" and path.endswith(COMPRESSED)) else ""


def expand(place: str) -> tuple[fsspec.AbstractFileSystem, list[str], bool]:
    """The file system, the files of a place by name, and whether the place is a folder. Raises UserError for none."""
    fs, path = open_place(place)
    if has_pattern(path):
        return fs, sorted(found for found in fs.glob(path) if fs.isfile(found)), False
    if fs.isdir(path):
        found = (entry["name"] for entry in fs.ls(path, detail=True) if entry["type"] == "file")
        return fs, sorted(name for name in found if not PurePosixPath(name).name.startswith(".")), True
    if not fs.exists(path):
        raise UserError(
            f"download.input: {place} does not exist; give a file, folder or pattern of {', '.join(KINDS)}, or "
            "run `mdc sample` to make the sample's"
        )
    return fs, [path], False


def list_files(place: str) -> list[ListFile]:
    """The list itself, the lists in a folder, or those that a pattern finds, by name. Raises UserError for none."""
    fs, paths, in_folder = expand(place)
    kinds = IN_FOLDERS if in_folder else KINDS
    files = [ListFile(fs, path, _kind(path)) for path in paths if _kind(path) in kinds]
    unknown = [] if in_folder else [path for path in paths if not _kind(path)]
    if unknown or not files:
        what = f"{unknown[0]} is" if unknown else f"{place} holds"
        raise UserError(
            f"download.input: {what} no list of a known kind; give {', '.join(KINDS)} (.gz too). A folder is read for "
            f"{', '.join(IN_FOLDERS)}; for pictures that are here already set download.kind to images or webdataset"
        )
    return files


def check_places(place: str, *written: Path) -> None:
    """Refuse to write where the lists are read: a second run would read what the first one wrote.

    Symbolic links are followed first. A single file may have its outputs beside it; a folder of lists may not have
    them inside.
    """
    if not is_local(place):
        return
    pattern = has_pattern(place)
    source = Path(root_of(place) if pattern else place).resolve()
    for target in written:
        folder = target.resolve()
        if source.is_relative_to(folder) or (source.is_dir() and folder.is_relative_to(source)):
            raise UserError(
                f"{target} would be written where the list {place} is read"
                + (f" (it is {folder})" if folder != target.absolute() else "")
                + "; set paths.data and paths.runs, or download.input, to a folder outside the other"
            )


def _wanted_columns(params: DownloadParams) -> list[tuple[str, str]]:
    """The parameter, as `url_column`, and the column in the files that it names."""
    names = [(f"{ours}_column", getattr(params, f"{ours}_column")) for ours in ("url", "uid", "label", "group")]
    return [(name, column) for name, column in names if column] + [
        ("caption_column", column) for column in params.caption_columns
    ]


@contextmanager
def _text(file: ListFile) -> Iterator[io.TextIOWrapper]:
    """The text of a file, unpacked. Raises UserError where it is not UTF-8, or no whole gzip file, as it is read."""
    raw = file.fs.open(file.path, "rb", compression="infer")
    with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        try:
            yield text
        except UnicodeDecodeError as error:
            near = error.object[max(0, error.start - 20) : error.end + 20]
            raise UserError(f"{file} is not UTF-8: {error.reason} in {near!r}; convert it") from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{file} is no whole gzip file ({error}); fetch it again") from None


def _csv_records(file: ListFile, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """csv: quotes are balanced and doubled within. tsv: quotes are ordinary characters."""
    options: dict[str, Any] = {"delimiter": ",", "strict": True}
    if file.kind == "tsv":
        options = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    reader = csv.reader(lines, **options)
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


def _json_records(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """One object per line; None for a line that holds none."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield number, record if isinstance(record, dict) else None


def _coco_records(file: ListFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """The images of a COCO captions file with `caption`: all of an image's, in the order of their ids."""
    with _text(file) as text:
        try:
            tree = json.load(text)
            captions: dict[Any, list[str]] = {image["id"]: [] for image in tree["images"]}
            for note in sorted(tree["annotations"], key=lambda note: note["id"]):
                captions[note["image_id"]].append(note["caption"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file} is no captions file as COCO's, with `images` and `annotations` ({error!r}); save other "
                "records as .jsonl, one object per line"
            ) from None
    for number, image in enumerate(tree["images"], 1):
        yield number, {**image, "caption": captions[image["id"]]}


def _text_rows(file: ListFile, params: DownloadParams) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Place and values by column of each record of a text file; None for values that do not fit."""
    if file.kind == "json":
        yield from ((f"{file.name} image {number}", record) for number, record in _coco_records(file))
        return
    with _text(file) as text:
        if file.kind == "txt":
            for line, url in enumerate(text, 1):
                if url.strip():
                    yield f"{file.name} line {line}", {params.url_column: url.strip()}
        elif file.kind == "jsonl":
            for line, record in _json_records(text):
                yield f"{file.name} line {line}", record
        else:
            records = _csv_records(file, text)
            header = params.header or next(records, (1, []))[1]
            for line, fields in records:
                fits = len(fields) == len(header)
                yield f"{file.name} line {line}", dict(zip(header, fields, strict=True)) if fits else None


def _texts(file: ListFile, values: pa.Array, column: str) -> list[Any]:
    """Texts, or lists of texts."""
    many = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
    kind = pa.list_(pa.string()) if many else pa.string()
    try:
        return values.cast(kind).to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{file}: column {column!r} of type {values.type} is no text: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: column {column!r} is not UTF-8: {error.reason}; write it again") from None


def _parquet_rows(file: ListFile, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with file.fs.open(file.path, "rb") as source, pq.ParquetFile(source) as parquet:
        for batch in parquet.iter_batches(8192, columns=list(dict.fromkeys(columns))):
            values = {column: _texts(file, batch.column(column), column) for column in columns}
            for row in zip(*values.values(), strict=True):
                number += 1
                yield f"{file.name} row {number}", dict(zip(values, row, strict=True))


def _rows(file: ListFile, params: DownloadParams) -> Iterator[tuple[str, dict[str, Any] | None]]:
    if file.kind == "parquet":
        return _parquet_rows(file, [column for _, column in _wanted_columns(params)])
    return _text_rows(file, params)


def _columns(file: ListFile, params: DownloadParams) -> list[str]:
    """The names of the columns. Raises UserError for a file that is not what its name says."""
    if file.kind == "parquet":
        try:
            with file.fs.open(file.path, "rb") as source:
                return list(pq.read_schema(source).names)
        except pa.ArrowInvalid as error:
            raise UserError(f"{file} is not a parquet file: {error}") from None
    if file.kind == "txt":
        return [params.url_column]
    if file.kind in ("csv", "tsv"):
        with _text(file) as text:
            first = next(_csv_records(file, text), (1, []))[1]
        if params.header and first:
            _check_header(file, first, params)
        return params.header or first
    place, record = next(_text_rows(file, params), ("", {}))
    if record is None:
        raise UserError(f"{file}: {place} holds no JSON object; give one per line")
    return list(record)


def _check_header(file: ListFile, first: list[str], params: DownloadParams) -> None:
    """Raise UserError where the first record cannot have the columns of `download.header`."""
    if len(first) != len(params.header):
        raise UserError(
            f"{file}: its first line has {len(first)} fields, but download.header names {len(params.header)}: "
            f"{', '.join(params.header)}; name every column of the file"
        )
    url = dict(zip(params.header, first, strict=True)).get(params.url_column, "")
    if params.kind == "urls" and "://" not in url:
        raise UserError(
            f"{file}: {url[:80]!r} in its first line, the column {params.url_column!r} of download.header "
            f"{params.header}, is no URL; mend the order, or empty download.header if that line names the columns"
        )


def check_columns(files: list[ListFile], params: DownloadParams) -> None:
    """Raise UserError that names each file, the column it lacks, those it has and the close match."""
    problems = []
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        found = list(pool.map(lambda file: _columns(file, params), files))
    for file, columns in zip(files, found, strict=True):
        for name, column in _wanted_columns(params):
            count = columns.count(column)
            if count == 1 or (not columns and file.kind == "jsonl"):
                continue
            if count > 1:
                problems.append(f"{file} has {count} columns named {column!r} (download.{name}); rename one")
                continue
            folded = {name.casefold(): name for name in columns}
            close = difflib.get_close_matches(column.casefold(), list(folded), n=1)
            hint = f"; did you mean {folded[close[0]]!r}?" if close else ""
            if name == "caption_column" and not close:
                hint = '; set download.caption_column to "" for a list without captions'
            has = ", ".join(columns) or "no columns"
            problems.append(f"{file} has no column {column!r} (download.{name}); it has {has}{hint}")
    if problems:
        raise UserError("\n".join(problems))


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


def _word(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def _given(values: dict[str, Any], params: DownloadParams) -> list[tuple[str, Any]]:
    """What the columns of captions hold, one text or several."""
    held = [(column, values.get(column)) for column in params.caption_columns]
    return [(column, text) for column, value in held for text in (value if isinstance(value, list) else [value])]


def _captions(values: dict[str, Any], params: DownloadParams) -> list[tuple[str, str]]:
    """Every caption that is not missing, with the column that it comes from."""
    found = []
    for column, text in _given(values, params):
        word = _word(text)
        if not is_missing(word):
            found.append((column, " ".join(word.split()) if params.line_breaks == "space" else word))
    return found


def malformed(place: str, url: str = "") -> Record:
    """place: what is wrong may follow it."""
    place, url = (text.encode(errors="backslashreplace").decode() for text in (place, url))
    return Record(place, hash_uid(place), url, [], dropped="malformed")


def _is_utf8(text: str) -> bool:
    r"""Not for half a character, as JSON can spell it (\ud83d) and as names of files can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_record(
    place: str,
    url: str,
    values: dict[str, Any],
    params: DownloadParams,
    captions: Sequence[tuple[str, str]] = (),
    name: str = "",
) -> Record:
    """A record of the values that a list, or a file beside a picture, gives.

    captions: more of them, which come first. name: what stands for the URL in the uid. Raises UserError for a uid that
    cannot name a file. Reasons: no_url, missing_caption, line_break (no caption is without a tab or line break),
    malformed (half a character somewhere, or an object in the place of a caption).
    """
    if any(isinstance(text, (dict, list)) for _, text in _given(values, params)):
        return malformed(f"{place} holds no text as its caption", url)
    found = list(dict.fromkeys([*captions, *_captions(values, params)]))
    columns = (params.uid_column, params.label_column, params.group_column)
    uid, label, group = (_word(values.get(column)) if column else "" for column in columns)
    if not all(map(_is_utf8, (url, uid, label, group, *(text for _, text in found)))):
        return malformed(f"{place} is not UTF-8", url)
    whole = [(source, text) for source, text in found if not ("\n" in text or "\t" in text or "\r" in text)]
    if not url.strip():
        dropped = "no_url"
    elif whole or not params.caption_columns:
        dropped = ""
    else:
        dropped = "line_break" if found else "missing_caption"
    if params.uid_column:
        _check_uid(uid, place)
    else:
        uid = hash_uid(name or url, *([text for _, text in found] or [""]))
    kept = found if dropped else whole
    return Record(place, uid, url.strip(), kept, label, group, dropped, len(found) - len(kept))


def read_records(files: list[ListFile], params: DownloadParams) -> Iterator[Record]:
    """Every record of the files in their order; `malformed` are those with a wrong number of fields, or no JSON.

    See `make_record` for the other reasons.
    """
    for file in files:
        for place, values in _rows(file, params):
            if values is None:
                yield malformed(place)
            else:
                yield make_record(place, _word(values.get(params.url_column)), values, params)
