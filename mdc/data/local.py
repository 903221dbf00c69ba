"""Pictures that are here already: folders with captions beside the pictures, and WebDataset shards.

They become records like those of a list, and go through the same rules, without a request. Here is any file system
that fsspec reads.
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Any

import fsspec

from mdc.config import DownloadParams
from mdc.data.fetch import FetchFailed
from mdc.data.source import (
    ListFile,
    Record,
    check_columns,
    expand,
    list_files,
    make_record,
    malformed,
    open_place,
    read_records,
    root_of,
)
from mdc.errors import UserError

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2")
KEY = "__key__"  # a shard's own name of a sample, which `download.uid_column` may name
METADATA = "metadata"  # the file in a folder of pictures that lists their paths and captions


class _Malformed(ValueError):
    """A file beside a picture that cannot be read as text; the message says why."""


def _parse(text: bytes, kind: str) -> Any:
    """The contents of a `.txt` or `.json` file that belongs to a picture. Raises _Malformed."""
    try:
        value = text.decode("utf-8-sig")
        if kind == ".txt":
            return value.strip()
        fields = json.loads(value)
    except UnicodeDecodeError as error:
        raise _Malformed(f"({kind}) is not UTF-8: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"({kind}) is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _Malformed(f"({kind}) holds {type(fields).__name__}, not a JSON object with a caption")
    return fields


def _described(
    place: str, url: str, name: str, texts: dict[str, bytes], params: DownloadParams, key: str = ""
) -> Record:
    """texts: what lies beside the picture, by `.txt` and `.json`. A `.txt` is the main caption.

    Where one of them is no text the record is dropped as `malformed`, as one of a list is.
    """
    try:
        values = {KEY: key} | (_parse(texts[".json"], ".json") if ".json" in texts else {})
        text = _parse(texts[".txt"], ".txt") if ".txt" in texts and params.caption_columns else ""
    except _Malformed as problem:
        return malformed(f"{place} {problem}", url)
    captions = []
    if text:
        words = " ".join(text.split()) if params.line_breaks == "space" else text
        column = params.caption_columns[0]
        captions = [(column if values.get(column) in (None, text) else "txt", words)]
    return make_record(place, url, values, params, captions, name)


def _metadata(place: str) -> list[ListFile]:
    fs, paths, _ = expand(place)
    found = [path for path in paths if PurePosixPath(path).name.partition(".")[0] == METADATA]
    if len(found) > 1:
        raise UserError(f"download.input: {place} holds {len(found)} files named {METADATA}; leave one")
    return list_files(fs.unstrip_protocol(found[0])) if found else []


def _walk(fs: fsspec.AbstractFileSystem, root: str, folder: str, params: DownloadParams) -> Iterator[Record]:
    entries = sorted(fs.ls(folder, detail=True), key=lambda entry: str(entry["name"]))
    names = {entry["name"] for entry in entries}
    for entry in entries:
        path = PurePosixPath(entry["name"])
        if path.name.startswith(".") or path == PurePosixPath(folder):  # object stores may list a folder in itself
            continue
        if entry["type"] == "directory":
            yield from _walk(fs, root, entry["name"], params)
        elif path.suffix.lower() in PICTURES:
            beside = {kind: str(path.with_suffix(kind)) for kind in (".txt", ".json")}
            texts = {kind: fs.cat_file(text) for kind, text in beside.items() if text in names}
            url = str(path.relative_to(root))
            yield _described(url, url, url, texts, params)


def read_folder(params: DownloadParams) -> Iterator[Record]:
    """The pictures of a folder and those below it; `url` is the path within the folder.

    Captions come from `metadata.parquet`, `.csv`, `.tsv`, `.jsonl` or `.json` (COCO's) in the folder, where
    `download.url_column` names the column of paths; without one, from `NAME.txt` and `NAME.json` beside `NAME.jpg`.
    """
    fs, root = open_place(params.input)
    if not fs.isdir(root):
        raise UserError(f"download.input: {params.input} is no folder; download.kind images needs one of pictures")
    if files := _metadata(params.input):
        check_columns(files, params)
        return read_records(files, params)
    return _walk(fs, root, root, params)


def _members(source: IO[bytes], tar_name: str) -> Iterator[tuple[str, str, tarfile.TarInfo, tarfile.TarFile]]:
    """Key, extension and header of each file; the extension starts at the first dot of the name."""
    try:
        with tarfile.open(fileobj=source, mode="r:") as tar:
            for info in tar:
                if info.isfile():
                    folder, _, base = info.name.rpartition("/")
                    stem, dot, rest = base.partition(".")
                    yield f"{folder}/{stem}" if folder else stem, (dot + rest).lower(), info, tar
    except tarfile.TarError as error:
        raise UserError(f"{tar_name} is no whole, uncompressed tar: {error}") from None


def _shard(fs: fsspec.AbstractFileSystem, path: str, root: str, params: DownloadParams) -> Iterator[Record]:
    name = path.removeprefix(root).lstrip("/")
    size = fs.size(path)
    with fs.open(path, "rb") as source:
        key, picture = "", ("", "")
        texts: dict[str, bytes] = {}
        for found, extension, info, tar in _members(source, path):
            if found != key and key:
                yield _described(f"{name}/{key}", *picture, texts, params, key)
            if found != key:
                key, picture, texts = found, ("", ""), {}
            if info.offset_data + info.size > size:
                raise UserError(f"{path} is no whole, uncompressed tar: it ends within {info.name}")
            if extension in PICTURES:
                picture = (f"{name}/{info.name}#{info.offset_data}+{info.size}", f"{name}/{info.name}")
            elif extension in (".txt", ".json"):
                content = tar.extractfile(info)
                assert content is not None, "a plain file has contents"
                texts[extension] = content.read()
        if key:
            yield _described(f"{name}/{key}", *picture, texts, params, key)


def read_webdataset(params: DownloadParams) -> Iterator[Record]:
    """The samples of WebDataset shards, by name; `url` is `SHARD/MEMBER#OFFSET+BYTES`.

    Captions come from a sample's `.txt`, and from the fields of its `.json` that `download.caption_column` names.
    """
    fs, paths, _ = expand(params.input)
    shards = [path for path in paths if path.endswith(".tar")]
    if not shards:
        raise UserError(f"download.input: {params.input} holds no .tar; download.kind webdataset needs shards")
    root = root_of(params.input)
    for path in shards:
        yield from _shard(fs, path, root, params)


def read_here(url: str, root: str, kind: str, max_bytes: int) -> bytes:
    """The picture that one of the functions above named. root: the address of the folder. Raises FetchFailed.

    Reasons: bad_url, not_found, unreadable, too_large.
    """
    path, span = url, ""
    if kind == "webdataset":
        member, _, span = url.rpartition("#")
        path = member.partition(".tar/")[0] + ".tar"
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise FetchFailed("bad_url", "a path that leads out of the folder of pictures")
    fs, folder = fsspec.core.url_to_fs(root)
    try:
        file = f"{folder}/{path}"
        start, size = map(int, span.split("+")) if span else (0, fs.size(file))
        if size > max_bytes:
            raise FetchFailed("too_large", f"{size} bytes, {max_bytes} allowed")
        return fs.cat_file(file, start=start, end=start + size) if span else fs.cat_file(file)
    except FetchFailed:
        raise
    except FileNotFoundError:
        raise FetchFailed("not_found", "no such file") from None
    except Exception as error:  # every file system raises errors of its own
        raise FetchFailed("unreadable", str(error)) from None
