"""img2dataset at work: it spreads the parts over processes or a cluster, and over threads; the rest is ours.

Its downloader has hooks for the picture (`resizer`) and for what is written (`sample_writer_class`), but none for the
request itself, which has no total deadline, no limit of bytes, no `Retry-After`, no limit per host and no robots.txt.
`Worker` puts `mdc.data.fetch` in that place. Its reader holds the whole list in memory; `_tasks` stands for it.
"""

import io
import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from multiprocessing.pool import IMapIterator, Pool
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pyarrow as pa

from mdc.config import ComputeParams, DownloadParams
from mdc.data.borrowed import Downloader, distributor, downloader
from mdc.data.fetch import FetchFailed, Limits, Manners, fetch
from mdc.data.images import Rejected, StoredImage, store
from mdc.data.ledger import Ledger
from mdc.data.local import read_here
from mdc.data.manners import SharedManners
from mdc.data.parts import DIGITS, PartWriter
from mdc.data.plan import PLAN_SCHEMA
from mdc.data.source import root_address
from mdc.errors import UserError
from mdc.processes import deaf_children, end_when_orphaned

REACHED_WITHIN = 5.0  # seconds, for the head of a cluster


@dataclass(frozen=True)
class Getter:
    """How the bytes of a row's URL are had. Stands for img2dataset's function that asks for an image."""

    limits: Limits
    manners: Manners
    kind: str  # download.kind
    root: str  # of pictures that are here already

    def __call__(
        self,
        row: tuple[int, str],
        timeout: float,
        retries: int,
        user_agent_token: str | None,
        disallowed_header_directives: set[str] | None,
    ) -> tuple[int, io.BytesIO | None, str | None]:
        key, url = row
        try:
            if self.kind == "urls":
                return key, io.BytesIO(fetch(url, self.limits, self.manners)), None
            return key, io.BytesIO(read_here(url, self.root, self.kind, self.limits.max_bytes)), None
        except FetchFailed as failure:
            return key, None, str(failure)


class Worker(Downloader):
    """img2dataset's downloader with our request in it. An error that is not one picture's own ends the run."""

    def __init__(self, get: Getter, is_child: bool, **options: Any) -> None:
        """is_child: whether it runs in a process that this one starts, rather than in one of a cluster."""
        super().__init__(**options)
        self.get, self.is_child = get, is_child

    def __call__(self, row: tuple[int, str]) -> tuple[bool, tuple[int, str]]:
        if self.is_child:
            end_when_orphaned()  # the pool starts its later workers from a thread
        downloader.download_image_with_retry = self.get
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


class _Spawning:
    """What img2dataset asks for a pool. Its workers, later ones included, leave Ctrl-C to this process."""

    def __init__(self, method: str) -> None:
        self.context = multiprocessing.get_context(method)

    def Pool(self, *args: Any, **options: Any) -> Pool:
        with deaf_children():
            return self.context.Pool(*args, **options)


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


def _tasks(ledger: Ledger) -> Iterator[tuple[int, str]]:
    """What stands for img2dataset's reader: the number of each missing part, and a file of its rows to ask for."""
    scratch = ledger.folder / "_tmp"
    scratch.mkdir(exist_ok=True)
    for part in ledger.missing():
        path = scratch / f"{part}.arrow"
        rows = ledger.asked(part)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
        yield part, str(path.absolute())


@contextmanager
def _ray(compute: ComputeParams) -> Iterator[Callable[..., None]]:
    """img2dataset's distributor on a Ray cluster, whose nodes see this folder and have this package."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"compute.distributor ray needs the package {error.name!r}; run `pip install 'mdc[cluster]'` on all nodes"
        ) from None
    try:
        if compute.ray_address != "auto":  # Ray itself would look for it for minutes
            host, _, port = compute.ray_address.rpartition(":")
            socket.create_connection((host, int(port)), REACHED_WITHIN).close()
        ray.init(compute.ray_address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise UserError(
            f"compute.ray_address {compute.ray_address!r}: no Ray cluster answers ({error}); start it with "
            "`ray start --head`, and `ray start --address=HEAD:6379` on the other nodes"
        ) from None
    try:
        yield distributor.ray_distributor
    finally:
        ray.shutdown()


@contextmanager
def _processes(_compute: ComputeParams) -> Iterator[Callable[..., None]]:
    """img2dataset's distributor over processes of this machine, watched."""
    watched = mock.patch.multiple(distributor, tqdm=_watched, get_context=_Spawning)
    # workers that are ended early leave locks of libraries to Python's resource tracker, which removes and reports them
    tidied = mock.patch.dict(os.environ, PYTHONWARNINGS="ignore:resource_tracker:UserWarning")
    with watched, tidied:
        yield distributor.multiprocessing_distributor


DISTRIBUTORS = {"multiprocessing": _processes, "ray": _ray}


def fetch_parts(ledger: Ledger, params: DownloadParams, compute: ComputeParams, limits: Limits) -> None:
    """Fetch the rows that the ledger lacks, in parts, into its folder. Limits per host hold over all workers."""
    here = params.kind != "urls"
    get = Getter(
        limits=limits,
        manners=Manners() if here else SharedManners.of(params, ledger.folder / "hosts"),
        kind=params.kind,
        root=root_address(params.input) if here else "",
    )
    worker = Worker(
        get,
        is_child=compute.distributor == "multiprocessing",
        sample_writer_class=PartWriter,
        resizer=Resizer(params),
        thread_count=compute.download_threads,
        save_caption=True,
        extract_exif=False,
        output_folder=str(ledger.folder.absolute()),
        column_list=PLAN_SCHEMA.names,
        timeout=limits.timeout,
        number_sample_per_shard=params.samples_per_shard,
        oom_shard_count=DIGITS,
        compute_hash="sha256",
        verify_hash_type=None,
        encode_format=params.image_format,
        retries=limits.retries,
        user_agent_token=None,
        disallowed_header_directives=None,
    )
    processes = min(compute.download_processes, len(ledger.missing()))
    with DISTRIBUTORS[compute.distributor](compute) as distribute, redirect_stdout(io.StringIO()):
        distribute(processes, worker, _tasks(ledger), None, 0)
