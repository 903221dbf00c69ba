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
from mdc.data.source import LIST_SCHEMA, check_places, read_list
from mdc.errors import UserError
from mdc.files import fingerprint, sha256, whole_file, whole_folder, write_json, write_manifest

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


def _part_rows(folder: Path, part: int) -> pa.Table:
    return pq.read_table(folder / f"{part:05d}.parquet")


def _reasons(statuses: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(statuses).items()))


def _open_work(work: Path, identity: str) -> Path:
    """The folder of parts for this list and these parameters; parts of others are removed."""
    folder = work / "parts"
    record = folder / "identity.json"
    if folder.exists() and not (record.is_file() and record.read_text(encoding="utf-8").strip() == f'"{identity}"'):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(record, identity)
    for left in [*folder.glob("*.progress"), *folder.glob(".*.tmp"), *folder.glob("tmp*")]:
        left.unlink()
    shutil.rmtree(folder / "_tmp", ignore_errors=True)
    return folder


def _check_success(folder: Path, parts: int, statuses: list[str], params: DownloadParams) -> None:
    """Fail below the minimum rate. Parts with failures that may pass are removed, so the next run asks again."""
    succeeded = statuses.count("ok")
    if succeeded and succeeded >= params.min_success_rate * len(statuses):
        return
    for part in range(parts):
        status = _part_rows(folder, part)["status"].to_pylist()
        if any(is_retryable(value.removeprefix("failed:")) for value in status):
            (folder / f"{part:05d}.parquet").unlink()
    counts = ", ".join(f"{name} {count}" for name, count in _reasons(statuses).items())
    what = (
        f"{succeeded} of {len(statuses)} images ({succeeded / len(statuses):.1%}) could be downloaded, below "
        f"download.min_success_rate {params.min_success_rate}"
        if succeeded
        else f"none of {len(statuses)} images could be downloaded"
    )
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
    asked = rows.filter(pc.is_null(rows["status"]))
    dropped = rows.filter(pc.is_valid(rows["status"]))
    if not asked.num_rows:
        reasons = _reasons(dropped["status"].to_pylist())
        raise UserError(f"{params.input}: no row can be asked for: {reasons}; mend the list")
    try:
        from mdc.data.parts import PART_SCHEMA, fetch_parts, is_done
    except ImportError as error:
        raise UserError(f"downloading needs the package {error.name!r}; run `pip install 'mdc[download]'`") from None

    folder = work / "parts"
    plan = work / "plan.parquet"
    with whole_file(plan) as path:
        pq.write_table(asked.drop_columns(["status", "detail"]), path)
    settings = params.model_dump(exclude=REQUEST_ONLY)
    folder = _open_work(work, fingerprint({"plan": sha256(plan), "params": settings}))
    parts = -(-asked.num_rows // params.samples_per_shard)
    done = {part for part in range(parts) if is_done(folder, part)}
    limits = {name: getattr(params, name) for name in ("timeout", "deadline", "retries", "max_bytes", "user_agent")}
    if len(done) < parts:
        rows_done = sum(_part_rows(folder, part).num_rows for part in done)
        with (
            _full_disk_named(work),
            _sample_server(params, asked["url"]) as address,
            _bar(folder, asked.num_rows, rows_done, progress),
        ):
            fetch_parts(
                plan,
                folder,
                params,
                Limits(**limits, sample_server=address),
                done,
                min(compute.download_processes, parts - len(done)),
                compute.download_threads,
            )

    statuses: list[str] = []
    for part in range(parts):
        expected = asked.slice(part * params.samples_per_shard, params.samples_per_shard)["uid"].to_pylist()
        assert is_done(folder, part), f"part {part} was not written"
        found = _part_rows(folder, part)
        assert found["uid"].to_pylist() == sorted(expected), f"part {part} does not hold the rows it was given"
        statuses += found["status"].to_pylist()
    _check_success(folder, parts, statuses, params)

    with whole_folder(output) as temporary:
        for part in range(parts):
            for suffix in ("tar", "parquet"):
                _place(folder / f"{part:05d}.{suffix}", temporary / f"{part:05d}.{suffix}")
        if dropped.num_rows:
            missing = [
                pa.nulls(dropped.num_rows, field.type) for field in PART_SCHEMA if field.name not in LIST_SCHEMA.names
            ]
            table = pa.table([*dropped.columns, *missing], schema=PART_SCHEMA)
            pq.write_table(table, temporary / DROPPED)
        counts = {
            "rows": rows.num_rows,
            "ok": statuses.count("ok"),
            "reasons": _reasons(statuses + dropped["status"].to_pylist()),
        }
        inputs = {"list": fingerprint(sha256(plan)), "params": params.model_dump(mode="json")}
        write_manifest(temporary, inputs, counts)
    shutil.rmtree(folder)
    plan.unlink()
    if not any(work.iterdir()):
        work.rmdir()


def read_metadata(downloaded: Path) -> pa.Table:
    """One row per row of the list, the parts in order and then the rows that were dropped before any request."""
    return pa.concat_tables(pq.read_table(path) for path in sorted(downloaded.glob("*.parquet")))
