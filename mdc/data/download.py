"""From a list of URLs to images stored at training size, with every row of the list accounted for."""

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from mdc.config import ComputeParams, DownloadParams
from mdc.data import images
from mdc.data.fetch import Limits
from mdc.data.ledger import Ledger
from mdc.data.parts import is_final
from mdc.data.plan import Plan, write_plan
from mdc.data.source import check_places, root_of
from mdc.data.work import full_disk_named, place
from mdc.errors import UserError
from mdc.files import MANIFEST, read_json, sha256, whole_folder, write_manifest

DROPPED = "dropped.parquet"  # rows of the list that were not asked for
# parameters that decide how a picture is asked for, not what is stored
REQUEST_ONLY = {"timeout", "deadline", "retries", "per_host", "longest_wait", "min_success_rate", "user_agent"}


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


@contextmanager
def _sample_server(params: DownloadParams, plan: Plan) -> Iterator[str]:
    """The address that stands for `sample:`, or "" where the list has no such URLs."""
    if params.kind != "urls" or not plan.of_the_sample():
        yield ""
        return
    with serve(Path(root_of(params.input))) as address:
        yield address


def settings(params: DownloadParams) -> dict[str, Any]:
    """The parameters that decide what is stored. Work done with the same ones can be gone on with."""
    return params.model_dump(mode="json", exclude=REQUEST_ONLY)


def _fetch_missing(ledger: Ledger, params: DownloadParams, compute: ComputeParams, progress: bool) -> None:
    if not ledger.missing():
        return
    try:
        from mdc.data.workers import fetch_parts
    except ImportError as error:
        raise UserError(f"downloading needs the package {error.name!r}; run `pip install 'mdc[download]'`") from None
    limits = {name: getattr(params, name) for name in ("timeout", "deadline", "retries", "max_bytes", "user_agent")}
    known = ledger.known_rows()
    with _sample_server(params, ledger.plan) as address, _bar(ledger.folder, ledger.plan.rows, known, progress):
        fetch_parts(ledger, params, compute, Limits(**limits, sample_server=address))


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def _check_success(statuses: Counter[str], params: DownloadParams) -> None:
    """Fail below the minimum rate, with the counts of each reason."""
    succeeded, rows = statuses["ok"], statuses.total()
    if succeeded and succeeded >= params.min_success_rate * rows:
        return
    counts = ", ".join(f"{name} {count}" for name, count in _sorted(statuses).items())
    what = f"none of {rows} images could be downloaded"
    if succeeded:
        share = f"{succeeded} of {rows} images ({succeeded / rows:.1%}) could be downloaded"
        what = f"{share}, below download.min_success_rate {params.min_success_rate}"
    raise UserError(
        f"{params.input}: {what} ({counts}). Mend the cause and run again; what failed for a passing reason is then "
        "asked again"
    )


def _identity(params: DownloadParams, plan: Plan) -> dict[str, Any]:
    """Equal for runs that store the same for the same answers."""
    return {"plan": plan.digest(), "settings": settings(params), "images": sha256(Path(images.__file__))}


def _was_made_by(output: Path, identity: dict[str, Any]) -> bool:
    path = output / MANIFEST
    return path.is_file() and read_json(path)["inputs"].get("identity") == identity


def download(params: DownloadParams, compute: ComputeParams, work: Path, output: Path, progress: bool = True) -> None:
    """Fetch every row of the input and store the pictures as `output/00000.tar` with `00000.parquet`, ....

    The parquet files together have one row per row of the input, as `mdc.data.parts.PART_SCHEMA`: status `ok`,
    `failed:<reason>`, or one of those of `mdc.data.plan.write_plan` (rows that were not asked for, in
    `dropped.parquet`); width and height are of the stored picture, sha256 is of the bytes received. Equal inputs give
    equal bytes, whatever order the answers came in.
    work: keeps finished parts through a kill. Where `output` is there already, made from the same input with the same
    settings, or in `work`, only what failed for a reason that may pass is asked for again.
    Raises UserError for an input that cannot be used, before any request, and for too few successes.
    """
    check_places(params.input, output, work)
    with full_disk_named(work), closing(write_plan(params, work)) as plan:
        identity = _identity(params, plan)
        ledger = Ledger(work / "parts", plan, identity)
        if params.kind == "urls" and _was_made_by(output, identity):  # pictures that are here may have changed
            ledger.adopt(output)
        ledger.reopen()
        _fetch_missing(ledger, params, compute, progress)
        statuses = ledger.statuses()
        _check_success(statuses, params)
        reasons = statuses + plan.reasons
        assert reasons.total() == plan.counts["rows"], "a row of the input has no status"
        with whole_folder(output) as temporary:
            ledger.place(temporary)
            if plan.reasons:
                place(plan.dropped, temporary / DROPPED)
            counts = {
                **plan.counts,
                "ok": statuses["ok"],
                "retryable": sum(count for status, count in statuses.items() if not is_final(status)),
                "reasons": _sorted(reasons),
            }
            inputs = {"list": plan.digest(), "params": params.model_dump(mode="json"), "identity": identity}
            write_manifest(temporary, inputs, counts)
        shutil.rmtree(work)


def read_metadata(downloaded: Path) -> pa.Table:
    """One row per row of the list, the parts in order and then the rows that were dropped before any request."""
    return pa.concat_tables(pq.read_table(path) for path in sorted(downloaded.glob("*.parquet")))
