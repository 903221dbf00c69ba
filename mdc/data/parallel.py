"""Work over many files: by processes on one machine, or on a Ray cluster, through joblib.

A job is a function of files' names and of values that travel with it; it writes files and returns something small. So
results are the same for any number of workers, and a job that was killed is done again.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import joblib
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from mdc.config import ComputeParams
from mdc.errors import UserError
from mdc.processes import end_when_orphaned

T = TypeVar("T")
ONE_WORKER = ComputeParams()


def _in_worker(function: Callable[..., T], folder: Path, *args: Any) -> T:
    """folder: where relative names start; on a cluster, a folder that all machines share."""
    os.chdir(folder)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores belong to the other workers
    return function(*args)


def for_each(function: Callable[..., T], jobs: Iterable[tuple[Any, ...]], compute: ComputeParams) -> Iterator[T]:
    """`function(*job)` of each job, in their order, by `compute.data_workers` processes here or on the cluster.

    Raises UserError when a worker is killed, or where there is no cluster.
    """
    if compute.distributor == "ray":
        _join_cluster(compute.ray_address)
        with joblib.parallel_config(backend="ray", n_jobs=compute.data_workers):
            yield from joblib.Parallel(batch_size=1)(_delayed(function, jobs))
    elif compute.data_workers == 1:
        yield from (function(*job) for job in jobs)
    else:
        yield from _here(function, jobs, compute.data_workers)


def _delayed(function: Callable[..., T], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    return (joblib.delayed(_in_worker)(function, Path.cwd(), *job) for job in jobs)


def _here(function: Callable[..., T], jobs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[T]:
    try:
        # a worker that still starts, or waits for a job, when this process is killed must end as well
        ending: dict[str, Any] = {"initializer": end_when_orphaned, "initargs": (1.0, os.getpid())}
        with joblib.parallel_config(backend="loky", n_jobs=workers, **ending):
            parallel = joblib.Parallel(return_as="generator", pre_dispatch="2 * n_jobs", batch_size=1)
        yield from parallel(_delayed(function, jobs))
    except TerminatedWorkerError:
        raise UserError(
            "a worker process was killed, often because memory ran out; run again to continue, with fewer "
            f"compute.data_workers than {workers}"
        ) from None
    finally:
        get_reusable_executor().shutdown()  # idle workers would keep their memory


def _join_cluster(address: str) -> None:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise UserError("compute.distributor ray needs a package; run `pip install 'mdc[cluster]'`") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except ConnectionError as error:
            raise UserError(f"compute.ray_address {address}: {error}; start one with `ray start --head`") from None
    register_ray()
