"""From a list of URLs to images stored at training size, with every row of the list accounted for."""

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from mdc.config import ComputeParams, DownloadParams
from mdc.data.fetch import SAMPLE_SCHEME, Limits, is_retryable
from mdc.data.parts import PART_SCHEMA, is_done, part_path, part_rows
from mdc.data.source import check_places, read_list
from mdc.errors import UserError
from mdc.files import read_json, sha256, whole_file, whole_folder, write_json, write_manifest

DROPPED = "dropped.parquet"  # rows of the list that were not asked for
# parameters that decide how a picture is asked for, not what is stored
REQUEST_ONLY = {"timeout", "deadline", "retries", "min_success_rate", "user_agent", "input"}


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Silent: failures are in the metadata."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 512  # connections waiting; all threads knock at once
    daemon_threads = True


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on localhost, on a port that is free; yields the address without a final slash."""
    server = _Server(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _bar(folder: Path, total: int, done: int, show: bool) -> Iterator[None]:
    """A bar over rows: the workers write one byte per row into files that are measured here."""
    stop = threading.Event()
    with tqdm(total=total, initial=done, desc="downloading", unit="image", disable=not show) as bar:

        def update() -> None:
            written = sum(file.stat().st_size for file in folder.glob("*.progress"))
            bar.update(done + written - bar.n)

        def watch() -> None:
            while not stop.wait(0.5):
                update()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            update()


def _list_folder(params: DownloadParams) -> Path:
    place = Path(params.input)
    return place if place.is_dir() else place.parent


@contextmanager
def _sample_server(params: DownloadParams, urls: pa.ChunkedArray) -> Iterator[str]:
    """The address that stands for `sample:`, or "" where the list has no such URLs."""
    if not pc.any(pc.starts_with(urls, f"{SAMPLE_SCHEME}:")).as_py():
        yield ""
        return
    with serve(_list_folder(params)) as address:
        yield address


def _reasons(statuses: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(statuses).items()))


class _Work:
    """Unfinished work on one list: the plan of what to ask, and a folder of parts that survives a kill."""

    def __init__(self, work: Path, asked: pa.Table, params: DownloadParams) -> None:
        """Keeps finished parts of the same plan and parameters; those of others are removed."""
        self._work = work
        self.plan = work / "plan.parquet"
        self.folder = work / "parts"
        size = params.samples_per_shard
        self.uids = [asked["uid"].slice(start, size).to_pylist() for start in range(0, asked.num_rows, size)]
        with whole_file(self.plan) as path:
            pq.write_table(asked.drop_columns(["status", "detail"]), path)
        settings = params.model_dump(mode="json", exclude=REQUEST_ONLY)
        self._claim({"plan": sha256(self.plan), "params": settings})

    def _claim(self, identity: dict[str, Any]) -> None:
        record = self.folder / "identity.json"
        if self.folder.exists() and not (record.is_file() and read_json(record) == identity):
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(record, identity)
        for left in [*self.folder.glob("*.progress"), *self.folder.glob(".*.tmp")]:
            left.unlink()

    def done(self) -> set[int]:
        return {part for part, uids in enumerate(self.uids) if is_done(self.folder, part, uids)}

    def statuses(self) -> list[str]:
        """Of every row that was asked for. Raises RuntimeError if a row is missing."""
        missing = sorted(set(range(len(self.uids))) - self.done())
        if missing:
            raise RuntimeError(f"parts {missing} lack rows; the messages above say what befell them")
        return [status for part in range(len(self.uids)) for status in self._part_statuses(part)]

    def forget_retryable(self) -> None:
        """Have parts with failures that may pass asked for again by the next run."""
        for part in range(len(self.uids)):
            if any(is_retryable(status.removeprefix("failed:")) for status in self._part_statuses(part)):
                part_path(self.folder, part, ".parquet").unlink()

    def _part_statuses(self, part: int) -> list[str]:
        return part_rows(self.folder, part)["status"].to_pylist()

    def close(self) -> None:
        shutil.rmtree(self.folder)
        self.plan.unlink()
        if not any(self._work.iterdir()):
            self._work.rmdir()


def _fetch_missing(
    work: _Work, params: DownloadParams, compute: ComputeParams, urls: pa.ChunkedArray, progress: bool
) -> None:
    done = work.done()
    if len(done) == len(work.uids):
        return
    try:
        from mdc.data.workers import fetch_parts
    except ImportError as error:
        raise UserError(f"downloading needs the package {error.name!r}; run `pip install 'mdc[download]'`") from None
    limits = {name: getattr(params, name) for name in ("timeout", "deadline", "retries", "max_bytes", "user_agent")}
    processes = min(compute.download_processes, len(work.uids) - len(done))
    rows_done = sum(len(work.uids[part]) for part in done)
    with _sample_server(params, urls) as address, _bar(work.folder, len(urls), rows_done, progress):
        threads = compute.download_threads
        fetch_parts(work.plan, work.folder, params, Limits(**limits, sample_server=address), done, processes, threads)


def _check_success(work: _Work, statuses: list[str], params: DownloadParams) -> None:
    """Fail below the minimum rate, with the counts of each reason."""
    succeeded = statuses.count("ok")
    if succeeded and succeeded >= params.min_success_rate * len(statuses):
        return
    work.forget_retryable()
    counts = ", ".join(f"{name} {count}" for name, count in _reasons(statuses).items())
    what = f"none of {len(statuses)} images could be downloaded"
    if succeeded:
        share = f"{succeeded} of {len(statuses)} images ({succeeded / len(statuses):.1%}) could be downloaded"
        what = f"{share}, below download.min_success_rate {params.min_success_rate}"
    raise UserError(
        f"{params.input}: {what} ({counts}). Mend the cause and run again; what failed for a passing reason is then "
        "asked again"
    )


@contextmanager
def _full_disk_named(work: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{work}: the disk is full; make room and run again, finished parts are kept") from None


def _place(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_dropped(dropped: pa.Table, path: Path) -> None:
    added = [field for field in PART_SCHEMA if field.name not in dropped.column_names]
    columns = [*dropped.columns, *(pa.nulls(dropped.num_rows, field.type) for field in added)]
    pq.write_table(pa.table(columns, schema=PART_SCHEMA), path)


def download(params: DownloadParams, compute: ComputeParams, work: Path, output: Path, progress: bool = True) -> None:
    """Fetch every row of the list and store the pictures as `output/00000.tar` with `00000.parquet`, ....

    The parquet files together have one row per row of the list: status `ok`, `failed:<reason>` or `dropped:<reason>`
    (rows that were not asked for are in `dropped.parquet`); width and height are of the stored picture, sha256 is of
    the bytes received. Equal inputs give equal bytes, whatever order the answers came in.
    work: keeps finished parts through a kill; they are not asked for again.
    Raises UserError for a list that cannot be used, before any request, and for too few successes.
    """
    check_places(Path(params.input), output, work)
    rows = read_list(params)
    asked, dropped = rows.filter(pc.is_null(rows["status"])), rows.filter(pc.is_valid(rows["status"]))
    reasons = dropped["status"].to_pylist()
    if not asked.num_rows:
        raise UserError(f"{params.input}: no row can be asked for: {_reasons(reasons)}; mend the list")
    with _full_disk_named(work):
        unfinished = _Work(work, asked, params)
        _fetch_missing(unfinished, params, compute, asked["url"], progress)
        statuses = unfinished.statuses()
        _check_success(unfinished, statuses, params)
        with whole_folder(output) as temporary:
            for part in range(len(unfinished.uids)):
                for suffix in (".tar", ".parquet"):
                    _place(part_path(unfinished.folder, part, suffix), part_path(temporary, part, suffix))
            if dropped.num_rows:
                _write_dropped(dropped, temporary / DROPPED)
            counts = {"rows": rows.num_rows, "ok": statuses.count("ok"), "reasons": _reasons(statuses + reasons)}
            inputs = {"list": sha256(unfinished.plan), "params": params.model_dump(mode="json")}
            write_manifest(temporary, inputs, counts)
        unfinished.close()


def read_metadata(downloaded: Path) -> pa.Table:
    """One row per row of the list, the parts in order and then the rows that were dropped before any request."""
    return pa.concat_tables(pq.read_table(path) for path in sorted(downloaded.glob("*.parquet")))
