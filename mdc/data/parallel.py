"""Work over many files: by processes on one machine, or on a Ray cluster, through joblib.

A job is a function of a file's name and of values that travel with it; it writes files and returns something small. So
results are the same for any number of workers, and a job that was killed is done again.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import joblib
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from mdc.config import ComputeParams
from mdc.errors import UserError
from mdc.processes import end_when_orphaned

T = TypeVar("T")
ONE_WORKER = ComputeParams()


def _in_worker(function: Callable[..., T], *args: Any) -> T:
    end_when_orphaned()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores belong to the other workers
    return function(*args)


def for_each(function: Callable[..., T], jobs: Iterable[tuple[Any, ...]], compute: ComputeParams) -> Iterator[T]:
    """`function(*job)` of each job, in their order, by `compute.data_workers` processes.

    Raises UserError when a worker is killed.
    """
    if compute.data_workers == 1:
        yield from (function(*job) for job in jobs)
        return
    parallel = joblib.Parallel(
        n_jobs=compute.data_workers, return_as="generator", pre_dispatch="2 * n_jobs", batch_size=1
    )
    try:
        yield from parallel(joblib.delayed(_in_worker)(function, *job) for job in jobs)
    except TerminatedWorkerError:
        raise UserError(
            "a worker process was killed, often because memory ran out; run again to continue, with fewer "
            f"compute.data_workers than {compute.data_workers}"
        ) from None
    finally:
        get_reusable_executor().shutdown()  # idle workers would keep their memory
