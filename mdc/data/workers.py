"""img2dataset at work: it shards the list, spreads it over processes and threads, and fetches; the rest is ours.

Its downloader has hooks for the picture (`resizer`) and for what is written (`sample_writer_class`), but none for the
request itself, which has no total deadline and no limit of bytes. `Worker` puts `mdc.data.fetch` in that place.
Nothing else in this project imports img2dataset.
"""

import io
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from email.message import Message
from functools import partial
from multiprocessing.pool import IMapIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import img2dataset.distributor
import img2dataset.downloader
from img2dataset.downloader import Downloader, is_disallowed
from img2dataset.reader import Reader

from mdc.config import DownloadParams
from mdc.data.fetch import FetchFailed, Limits, fetch
from mdc.data.images import Rejected, StoredImage, store
from mdc.data.parts import DIGITS, PartWriter
from mdc.errors import UserError
from mdc.processes import end_when_orphaned

OPT_OUT = ("noai", "noimageai", "noindex", "noimageindex")  # img2dataset's own default
PLANNED = ("uid", "label", "group")  # columns that travel beside URL and caption


def fetch_row(
    row: tuple[int, str],
    timeout: float,
    retries: int,
    user_agent_token: str | None,
    disallowed_header_directives: set[str] | None,
    *,
    limits: Limits,
) -> tuple[int, io.BytesIO | None, str | None]:
    """Stands for img2dataset's function of the same arguments; `limits` holds the ones that count."""
    key, url = row

    def opted_out(headers: Message) -> bool:
        return bool(disallowed_header_directives) and is_disallowed(
            headers, user_agent_token, disallowed_header_directives
        )

    try:
        return key, io.BytesIO(fetch(url, limits, opted_out)), None
    except FetchFailed as failure:
        return key, None, str(failure)


class Worker(Downloader):
    """img2dataset's downloader with our request in it. An error that is not one picture's own ends the run."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.limits = limits

    def __call__(self, row: tuple[int, str]) -> tuple[bool, tuple[int, str]]:
        end_when_orphaned()  # the pool starts its later workers from a thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
        img2dataset.downloader.download_image_with_retry = partial(fetch_row, limits=self.limits)
        self.download_shard(row)
        return True, row


class Resizer:
    """img2dataset's hook for pictures; it hands the first value on to the writer as it is."""

    def __init__(self, params: DownloadParams) -> None:
        self.params = params

    def __call__(
        self, stream: io.BytesIO, _boxes: Any = None
    ) -> tuple[StoredImage | None, int | None, int | None, int | None, int | None, str | None]:
        try:
            image = store(stream.read(), self.params)
        except Rejected as rejected:
            return None, None, None, None, None, str(rejected)
        return image, image.width, image.height, image.original_width, image.original_height, None


def _watched(results: IMapIterator) -> Iterator[Any]:
    """Pass the pool's results on. The pool itself would wait for ever for a worker that was killed."""
    workers: dict[int | None, BaseProcess] = {}
    while True:
        workers |= {process.pid: process for process in multiprocessing.active_children()}
        try:
            yield results.next(timeout=1.0)
        except StopIteration:
            return
        except multiprocessing.TimeoutError:
            for process in workers.values():
                if "PoolWorker" in process.name and process.exitcode:
                    raise UserError(
                        f"a download process ended with exit code {process.exitcode}; -9 often means that memory ran "
                        "out. Run again to continue, with fewer compute.download_processes or download_threads"
                    ) from None


@contextmanager
def _hooked() -> Iterator[None]:
    """img2dataset's messages and its bar over parts give way to our watch over its pool, and one bar over rows."""
    watched = mock.patch.object(img2dataset.distributor, "tqdm", _watched)
    # workers that are ended early leave locks of libraries to Python's resource tracker, which removes and reports them
    tidied = mock.patch.dict(os.environ, PYTHONWARNINGS="ignore:resource_tracker:UserWarning")
    with watched, tidied, redirect_stdout(io.StringIO()):
        yield


def fetch_parts(
    plan: Path,
    folder: Path,
    params: DownloadParams,
    limits: Limits,
    done: set[int],
    processes: int,
    threads: int,
) -> None:
    """Fetch the rows of `plan` in parts of `params.samples_per_shard` into `folder`.

    plan: parquet with uid, url, caption, label, group. done: numbers of parts to leave alone.
    """
    scratch = folder / "_tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    reader = Reader(
        str(plan.absolute()),
        "parquet",
        "url",
        "caption",
        None,
        None,
        list(PLANNED),
        params.samples_per_shard,
        done,
        str(scratch.absolute()),
    )
    worker = Worker(
        limits,
        sample_writer_class=PartWriter,
        resizer=Resizer(params),
        thread_count=threads,
        save_caption=True,
        extract_exif=False,
        output_folder=str(folder.absolute()),
        column_list=reader.column_list,
        timeout=limits.timeout,
        number_sample_per_shard=params.samples_per_shard,
        oom_shard_count=DIGITS,
        compute_hash="sha256",
        verify_hash_type=None,
        encode_format=params.image_format,
        retries=limits.retries,
        user_agent_token=limits.user_agent.partition("/")[0],
        disallowed_header_directives=list(OPT_OUT),
    )
    distribute: Callable[..., None] = img2dataset.distributor.multiprocessing_distributor
    with _hooked():
        distribute(processes, worker, reader, None, 0)
